"""Results: what measurements leave behind, and what may be said of them."""
