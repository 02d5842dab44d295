from dataset.files import content_key, file_digest


def test_the_key_follows_values_and_not_their_order():
    key = content_key({"a": 1, "b": {"c": 2}})
    assert content_key({"b": {"c": 2}, "a": 1}) == key
    assert content_key({"a": 1, "b": {"c": 3}}) != key


def test_a_files_digest_is_its_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "x") == known
