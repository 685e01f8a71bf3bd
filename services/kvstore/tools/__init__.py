"""What an operator runs on a store: export, import, repair, bench, plots."""
