"""A file system that passes everything on to a folder, and fails where and when a test says so."""
