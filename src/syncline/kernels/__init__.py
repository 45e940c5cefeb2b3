"""Operations on the GPU, each beside its plain-PyTorch reference.

Not responsible for modules, parameters or training: those are in `nn`.
"""
