"""What a process tells: logs, terminal, and files of lines; none of it can fail or block."""
