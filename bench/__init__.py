"""Benchmarks, one package per kind of question; `python -m bench` lists them.

Comparisons are ratios of configurations measured side by side in one run. A benchmark is a module with a function
`main` in the package of its question, and a line in `__main__.py`. Packages share only the systems under test
(`systems`), the reports (`report.py`, `markdown.py`, `conditions.py`), measurements in turns (`paired.py`), the
diversity of texts (`diversity.py`) and the command line (`arguments.py`).
"""
