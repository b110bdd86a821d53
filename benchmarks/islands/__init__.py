"""Time to one loss on slow links: what is trained and timed, and the page of its figures."""
