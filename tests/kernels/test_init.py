import octavo_kernels


def test_public_names_are_listed_sorted_and_there():
    names = octavo_kernels.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert all(hasattr(octavo_kernels, name) for name in names)
    public = {name for name, value in vars(octavo_kernels).items() if callable(value)}
    assert {name for name in public if not name.startswith("_")} <= set(names)
