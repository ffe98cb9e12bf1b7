"""A fuzz test of everything that reads a log: foreign bytes, extreme numbers, hostile texts, and every command."""
