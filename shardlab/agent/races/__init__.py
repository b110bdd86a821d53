"""Rule of a race: who is faster, who is given up, and when it ends."""
