"""Tests of TensorFlow's clusters."""
