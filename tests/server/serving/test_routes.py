"""The table that says which version answers a call that names none."""

import random
from collections import Counter

import pytest

from headway_server.errors import ModelNotFoundError, StoreError
from headway_server.serving.routes import Alias, Route, Routes, read_routes, write_routes

VERSIONS = ["1", "2", "3"]


def test_the_latest_answers_where_nothing_is_said():
    assert Routes().choose("news", VERSIONS) == "3"


def test_the_default_version_answers_where_there_is_one():
    routes = Routes().with_route("news", Route(default_version="2"))
    assert routes.choose("news", VERSIONS) == "2"
    assert routes.choose("other", VERSIONS) == "3"


def test_a_default_version_that_is_not_there_is_an_error_and_no_other_version_steps_in():
    routes = Routes().with_route("news", Route(default_version="9"))
    with pytest.raises(ModelNotFoundError, match="model news has the default version 9, which cannot answer now"):
        routes.choose("news", VERSIONS)


def test_a_canary_answers_its_share_and_the_latest_other_version_the_rest():
    random.seed(5)
    routes = Routes().with_route("news", Route(canary_version="3", canary_share=0.2))
    answers = Counter(routes.choose("news", VERSIONS) for _ in range(5000))
    assert set(answers) == {"2", "3"}
    assert answers["3"] / 5000 == pytest.approx(0.2, abs=0.03)
    assert {routes.choose("news", VERSIONS, with_canary=False) for _ in range(100)} == {"2"}


def test_a_canary_that_is_not_loaded_gets_no_call():
    routes = Routes().with_route("news", Route(default_version="1", canary_version="4", canary_share=1.0))
    assert routes.choose("news", VERSIONS) == "1"


def test_a_canary_that_is_alone_answers_everything():
    routes = Routes().with_route("news", Route(canary_version="3", canary_share=0.01))
    assert {routes.choose("news", ["3"]) for _ in range(100)} == {"3"}


def test_an_alias_stands_for_a_model_or_a_version_and_a_named_version_wins():
    routes = Routes().with_alias("a", Alias(model="news")).with_alias("b", Alias(model="news", version="2"))
    assert routes.resolve("a", "") == ("news", "")
    assert routes.resolve("b", "") == ("news", "2")
    assert routes.resolve("b", "3") == ("news", "3")
    assert routes.resolve("news", "1") == ("news", "1")


def test_aliases_do_not_stand_for_aliases():
    routes = Routes().with_alias("a", Alias(model="b")).with_alias("b", Alias(model="news"))
    assert routes.resolve("a", "") == ("b", "")


def test_the_versions_that_the_table_names_are_known():
    route = Route(default_version="1", canary_version="2", canary_share=0.1)
    routes = Routes().with_route("news", route).with_alias("old", Alias(model="news", version="0"))
    assert [path for path in ("news/0", "news/1", "news/2", "news/3", "other/1") if routes.names(path)] == [
        "news/0",
        "news/1",
        "news/2",
    ]


def test_an_empty_route_and_an_alias_of_nothing_leave_the_table():
    routes = Routes().with_route("news", Route(default_version="1")).with_alias("a", Alias(model="news"))
    assert routes.with_route("news", Route()).with_alias("a", None) == Routes()


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        ({"canary_share": 0.1}, "requires canary_version"),
        ({"canary_version": "1", "default_version": "1"}, "which is the default version"),
        ({"canary_version": "1", "canary_share": 1.1}, "less than or equal to 1"),
        ({"default_version": "../1"}, "match pattern"),
    ],
)
def test_a_route_that_means_nothing_is_refused(route, problem):
    with pytest.raises(ValueError, match=problem):
        Route(**route)


def test_the_table_is_kept_in_a_file(tmp_path):
    route = Route(default_version="1", canary_version="2", canary_share=0.25)
    routes = Routes().with_route("news", route).with_alias("a", Alias(model="news", version="1"))
    file = tmp_path / "routes.json"
    assert read_routes(file) == Routes()
    write_routes(file, routes)
    assert read_routes(file) == routes
    assert [path.name for path in tmp_path.iterdir()] == ["routes.json"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "routes.json: Invalid JSON"),
        ('{"modles": {}}', "routes.json: modles is no setting; did you mean models?"),
        ('{"models": {"news": {"default": "1"}}}', "models.news.default is no setting; did you mean default_version?"),
        (" " * (2**20 + 1), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_holds_something_else_is_an_error_that_names_the_place(tmp_path, content, problem):
    file = tmp_path / "routes.json"
    file.write_text(content)
    with pytest.raises(StoreError, match=problem):
        read_routes(file)


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(StoreError, match=r"routes\.json cannot be written"):
        write_routes(tmp_path / "nowhere" / "routes.json", Routes())
