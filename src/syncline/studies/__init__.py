"""Trade-off curves: error against time over dials, learners and batch sizes, (σ, μ, λ) as in Rudra.

    grid.py      the points of a study, which cannot be, and the record of a finished one
    store.py     the study's folder: rows as they come, going on where it stopped
    summary.py   means over seeds, the best, groups of equal μλ
    point_run.py one point as a run
    worker_pool.py  processes that do pieces of work, such as points
    picture.py   the curves as SVG and as a page

Everything up to summary.py is pure or files only. Not responsible for options and displays (cli/).
"""
