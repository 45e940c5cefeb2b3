import sys
import torch
import syncline as sl
def learner(session):
    return __name__, 'pytest' in sys.modules, sys.path
def test_ref():
    r = sl.launch(learner, learners=1)
    print(__name__, r.returned)
    assert 0
