"""headwise: multi-head attention that is right, fast, visible and decidable."""
