"""Sections of the report by subject: columns, tables and sentences."""
