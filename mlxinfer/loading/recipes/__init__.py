"""Pooling and scoring recipes stored with embedding models and rerankers."""
