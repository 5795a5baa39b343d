"""Tests of node checks."""
