"""Models cut over the processes of a group: windows of arrays, moves between them, layers by type (C4, D1, S4)."""
