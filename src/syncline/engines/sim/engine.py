from syncline.engines.run import Engine


class Sim(Engine):
    def start(self, spec):
        raise NotImplementedError
