"""Tests in which all ranks of one launch take part."""
