"""Tests of dlm.data."""
