"""The compiled engine model: state as arrays (`layout`), and what its driver calls (`progress`)."""
