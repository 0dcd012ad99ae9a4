"""The one task graph: graph x strategy x machine."""
