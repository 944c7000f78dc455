"""Files that change while the server runs."""

import structlog

from headway_server.serving.files import Certificates, WatchedFiles


def watched(path, used):
    files = WatchedFiles([path], path.read_text, used, noun="test file")
    files.read()
    return files


async def test_a_file_is_read_again_once_nobody_writes_it_any_more(tmp_path):
    path, used = tmp_path / "file", []
    path.write_text("all of the keys")
    files = watched(path, used.append)
    for text in ("", "half of", "half of the keys"):  # each could be read, and is not what was meant
        path.write_text(text)
        await files.check()
    assert used == []
    for _ in range(3):
        await files.check()
    assert used == ["half of the keys"]


async def test_a_content_that_cannot_be_used_is_told_once_and_tried_again(tmp_path):
    path, used = tmp_path / "file", []

    def use(content):
        if not path.with_name("allowed").exists():
            raise OverflowError(content)
        used.append(content)

    path.write_text("old")
    files = watched(path, use)
    path.write_text("newer")
    with structlog.testing.capture_logs() as lines:
        for _ in range(4):
            await files.check()
        assert [line["reason"] for line in lines] == ["OverflowError"]
        path.with_name("allowed").touch()
        await files.check()
    assert used == ["newer"]


def test_no_message_shows_a_private_key():
    assert "secret" not in repr(Certificates(key=b"secret", chain=b"", client_authorities=None))
