"""Tests in which eight ranks take part: copies of a model, each shared by two or four of them."""
