"""Reports: pictures, tables and traces of plans."""
