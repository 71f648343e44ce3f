"""What runs show: one page, tables, and the paper's figures by name."""
