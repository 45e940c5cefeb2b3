"""The run folder: what a run leaves on the disk, and how it is read again.

    clock_file.py     clocks.bin: the vector clock of every update
    event_lines.py    events.jsonl, written line by line, read while it grows
    run_record.py     a run as its lines tell it: what displays, reports and comparisons render
    run_text.py       a run in lines; run_panel.py: a run as a panel, several runs side by side
    progress.py       shows a run while a caller waits for it
    folder_writer.py  follows a run and writes its folder, with model.safetensors and best.safetensors
    svg_plots.py      plots; html_page.py: report.html; net_graph.py: a net as a picture

docs/exact/run_folder.md describes the files. Not responsible for checkpoints (table/checkpoints.py).
"""

from __future__ import annotations

from syncline.report.clock_file import read_clocks
from syncline.report.folder_writer import Recording
from syncline.report.run_record import RunRecord, read_run

__all__ = ["Recording", "RunRecord", "read_clocks", "read_run"]
