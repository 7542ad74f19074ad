"""Tests of the whole repository; each is a sentence."""
