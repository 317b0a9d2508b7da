from __future__ import annotations

from collections.abc import Collection

import pytest

from penstock.extensions.models.targets import ANY, LEFT_OUT_SECONDS, ROUTES, Replicas, Target, Targets
from penstock.pipeline.errors import InvalidRequest, ModelNotFound

EMBEDDINGS, SPEECH, RERANK = "/v1/embeddings", "/v1/audio/speech", "/v1/rerank"


def target(name: str, kind: str, *names: str) -> Target:
    return Target(name, kind, Replicas([f"http://{name}"]), names=names)


CHAT = Target("chat", "generate")
EMBED, OTHER, RANK = target("embed", "embed", "text-*"), target("other", "embed"), target("rank", "rerank")
ADA = target("ada", "embed", "text-ada")
WHISPER, ALL = target("whisper", "audio"), target("all", ANY)
UNNAMED = Target("", "embed", Replicas(["http://unnamed"]))


def among(*targets: Target, unnamed: Target | None = None) -> Targets:
    return Targets({each.name: each for each in targets}, unnamed)


EVERY = among(CHAT, EMBED, OTHER, RANK, WHISPER)


@pytest.mark.parametrize(
    ("targets", "model", "path", "allowed", "expected"),
    [
        (EVERY, "embed", EMBEDDINGS, None, EMBED),
        (EVERY, "text-ada", EMBEDDINGS, None, EMBED),
        (EVERY, "rank", RERANK, None, RANK),
        (EVERY, "embed", RERANK, None, EMBED),
        (EVERY, None, SPEECH, None, WHISPER),
        (EVERY, None, EMBEDDINGS, {"other"}, OTHER),
        (EVERY, "text-ada", EMBEDDINGS, {"text-*"}, EMBED),
        (EVERY, "text-ada", EMBEDDINGS, {"text-ada"}, EMBED),
        (among(EMBED, ADA), "text-ada", EMBEDDINGS, None, ADA),
        (among(ALL), "all", SPEECH, None, ALL),
        (among(EMBED, unnamed=UNNAMED), "embed", EMBEDDINGS, None, EMBED),
        (among(EMBED, unnamed=UNNAMED), "any name", EMBEDDINGS, None, UNNAMED),
        (among(WHISPER, unnamed=UNNAMED), None, EMBEDDINGS, None, UNNAMED),
        (among(unnamed=UNNAMED), "a", EMBEDDINGS, {"a"}, UNNAMED),
    ],
)
def test_request_goes_to_the_model_that_it_means(
    targets: Targets, model: str | None, path: str, allowed: Collection[str] | None, expected: Target
) -> None:
    assert targets.of(model, path, allowed) is expected


@pytest.mark.parametrize(
    ("targets", "model", "path", "allowed", "says", "hides"),
    [
        (EVERY, "embd", EMBEDDINGS, None, ["'embed', 'other'", "did you mean embed?"], ["chat", "whisper"]),
        (EVERY, "other", EMBEDDINGS, {"embed"}, ["'embed'"], ["'chat'"]),
        (EVERY, "chatt", SPEECH, None, ["'whisper'"], ["did you mean", "embed"]),
        (EVERY, "embed", EMBEDDINGS, {"chat"}, [EMBEDDINGS], ["embed'"]),
        (EVERY, None, EMBEDDINGS, {"chat"}, [EMBEDDINGS], ["'embed'"]),
        (among(unnamed=UNNAMED), "b", EMBEDDINGS, {"a"}, [EMBEDDINGS], []),
        (among(unnamed=UNNAMED), None, EMBEDDINGS, {"a"}, [EMBEDDINGS], []),
    ],
)
def test_unknown_model_is_not_found_and_only_names_that_fit_are_shown(
    targets: Targets,
    model: str | None,
    path: str,
    allowed: Collection[str] | None,
    says: Collection[str],
    hides: Collection[str],
) -> None:
    with pytest.raises(ModelNotFound) as found:
        targets.of(model, path, allowed)
    assert found.value.param == "model"
    assert [text for text in says if text not in found.value.message] == []
    assert [text for text in hides if text in found.value.message.replace(path, "").replace(repr(model), "")] == []


@pytest.mark.parametrize(
    ("model", "path", "says"),
    [
        ("chat", EMBEDDINGS, "'generate'"),
        ("rank", EMBEDDINGS, "'rerank'"),
        ("embed", SPEECH, "'embed'"),
        (None, EMBEDDINGS, "'embed', 'other'"),
    ],
)
def test_model_of_another_kind_and_no_model_of_several_are_refused(model: str | None, path: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as found:
        EVERY.of(model, path)
    assert (found.value.status, found.value.param) == (400, "model")


def test_each_route_exists_if_a_model_answers_it() -> None:
    assert not any(among(CHAT).fit(path) for path in ROUTES)
    assert all(among(ALL).fit(path) for path in ROUTES)
    assert {path for path in ROUTES if among(CHAT, WHISPER).fit(path)} == {
        path for path in ROUTES if path.startswith("/v1/audio")
    }


async def order(replicas: Replicas) -> list[str]:
    async with replicas.servers() as urls:
        return [*urls]


async def test_servers_take_turns_and_one_that_refuses_waits_behind_the_others() -> None:
    now = 0.0
    replicas = Replicas(["a", "b", "c"], lambda: now)
    assert [await order(replicas) for _ in range(4)] == [[*"abc"], [*"bca"], [*"cab"], [*"abc"]]
    replicas.leave_out("c")
    assert [await order(replicas) for _ in range(3)] == [[*"bac"], [*"abc"], [*"abc"]]
    now += LEFT_OUT_SECONDS
    assert [await order(replicas) for _ in range(3)] == [[*"bca"], [*"cab"], [*"abc"]]
