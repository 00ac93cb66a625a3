import conductor.reuse


def test_exported_names() -> None:
    assert conductor.reuse.__all__ == ["HORIZON_S", "RetainedBlocks", "ReturnForecast", "ReuseModel", "Visit"]
    assert all(hasattr(conductor.reuse, name) for name in conductor.reuse.__all__)
