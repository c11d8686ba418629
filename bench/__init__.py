"""Measurements of the suite, by hand: nothing here runs in production or decides a test."""
