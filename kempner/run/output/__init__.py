"""Logs, terminal output and files of lines; writing them never fails and never blocks."""
