"""Running a trial, and the store that keeps a strategy from being measured twice."""
