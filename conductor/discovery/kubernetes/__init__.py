"""Pods of Kubernetes as instances: what their labels say, which are listed, and how changes are followed."""
