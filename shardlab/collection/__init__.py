"""Collection of what every stage measured of a run into one record."""
