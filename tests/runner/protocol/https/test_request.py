"""A request is checked before any of it is sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.protocol.https.failure import FetchFailed, Kind
from runner.protocol.https.request import (
    METHODS,
    MOST_HEAD_BYTES,
    MOST_HEADERS,
    MOST_URL_CHARACTERS,
    HttpsRequest,
    check_request,
    parse_url,
    redirect,
    write_request,
)

URL = "https://api.example.com/x"


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("https://example.com", "example.com:443", "/"),
        ("https://example.com/", "example.com:443", "/"),
        ("HTTPS://Example.COM./a/b?c=d", "example.com:443", "/a/b?c=d"),
        ("https://example.com?q", "example.com:443", "/?q"),
        ("https://example.com#f", "example.com:443", "/"),
        ("https://example.com/a#f/../?x\r\ny", "example.com:443", "/a"),
        ("https://example.com:8443/a", "example.com:8443", "/a"),
        ("https://bücher.example/ü".replace("/ü", "/%C3%BC"), "xn--bcher-kva.example:443", "/%C3%BC"),
        ("https://192.0.2.7/", "192.0.2.7:443", "/"),
        ("https://[2001:db8::7]:1/", "[2001:db8::7]:1", "/"),
        ("https://example.com/a@b:c//d?e://f@g", "example.com:443", "/a@b:c//d?e://f@g"),
        ("https://example.com?u@evil.org/", "example.com:443", "/?u@evil.org/"),
        ("https://example.com//evil.org/", "example.com:443", "//evil.org/"),
    ],
)
def test_urls(url: str, origin: str, path: str) -> None:
    target = parse_url(url)
    assert (target.origin, target.path) == (origin, path)


@pytest.mark.parametrize(
    ("url", "kind", "reason"),
    [
        ("", "denied", "not an https:// URL"),
        ("example.com", "denied", "not an https:// URL"),
        ("http://example.com/", "denied", "not an https:// URL"),
        ("file:///etc/passwd", "denied", "not an https:// URL"),
        ("https:example.com", "denied", "not an https:// URL"),
        (" https://example.com", "denied", "not an https:// URL"),
        ("httpsx://example.com", "denied", "not an https:// URL"),
        ("https://", "invalid", "no name"),
        ("https:///path", "invalid", "no name"),
        ("https://:443/", "invalid", "no name"),
        ("https://user@example.com/", "invalid", "user name"),
        ("https://user:pass@example.com/", "invalid", "user name"),
        ("https://good.example@evil.example/", "invalid", "user name"),
        ("https://good.example:443@evil.example/", "invalid", "user name"),
        ("https://good.example\\@evil.example/", "invalid", "percent sign"),
        ("https://good.example\\.evil.example/", "invalid", "percent sign"),
        ("https://example.com/a b", "invalid", "percent sign"),
        ("https://example.com/a\r\nX: y", "invalid", "percent sign"),
        ("https://example.com/a\nb", "invalid", "percent sign"),
        ("https://example.com/a\0b", "invalid", "percent sign"),
        ("https://example.com/a\tb", "invalid", "percent sign"),
        ("https://example.com/ü", "invalid", "percent sign"),
        ("https://example.com/a\\b", "invalid", "percent sign"),
        ("https://exam ple.com/", "invalid", "white space"),
        ("https://example.com\r\n/", "invalid", "white space"),
        ("https://example.com\0/", "invalid", "NUL"),
        ("https://example%2ecom/", "invalid", "percent"),
        ("https://example.com:/", "invalid", "no port"),
        ("https://example.com:0/", "invalid", "no port"),
        ("https://example.com:65536/", "invalid", "no port"),
        ("https://example.com:443:443/", "invalid", "two colons"),
        ("https://*.example.com/", "invalid", "wildcard"),
        ("https://127.1/", "invalid", "plain spelling"),
        ("https://0x7f000001/", "invalid", "plain spelling"),
        ("https://[fe80::1%25lo]/", "invalid", "zone"),
        (f"https://example.com/{'a' * MOST_URL_CHARACTERS}", "invalid", "characters"),
    ],
)
def test_urls_that_are_not_asked_for(url: str, kind: Kind, reason: str) -> None:
    with pytest.raises(FetchFailed, match=reason) as caught:
        parse_url(url)
    assert caught.value.kind == kind
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_a_url_of_the_greatest_length() -> None:
    url = "https://example.com/"
    url += "a" * (MOST_URL_CHARACTERS - len(url))
    assert len(parse_url(url).path) == MOST_URL_CHARACTERS - len("https://example.com")


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({"method": ""}, "invalid", "method"),
        ({"method": "CONNECT"}, "invalid", "method"),
        ({"method": "TRACE"}, "invalid", "method"),
        ({"method": "GET /evil HTTP/1.1\r\nX: y\r\n\r\nGET"}, "invalid", "method"),
        ({"method": "GET\r\n"}, "invalid", "method"),
        ({"body": b"x"}, "invalid", "has no body"),
        ({"method": "POST", "body": b"12345"}, "too_large", "5 bytes; 4 are the most"),
        ({"headers": (("", "x"),)}, "invalid", "not the name of a header"),
        ({"headers": (("X Y", "x"),)}, "invalid", "not the name of a header"),
        ({"headers": (("X:", "x"),)}, "invalid", "not the name of a header"),
        ({"headers": (("X\r\nHost", "x"),)}, "invalid", "not the name of a header"),
        ({"headers": (("X\n", "x"),)}, "invalid", "not the name of a header"),
        ({"headers": (("Ü", "x"),)}, "invalid", "not the name of a header"),
        ({"headers": (("X", "a\r\nHost: evil"),)}, "invalid", "line break"),
        ({"headers": (("X", "a\nb"),)}, "invalid", "line break"),
        ({"headers": (("X", "a\rb"),)}, "invalid", "line break"),
        ({"headers": (("X", "a\n"),)}, "invalid", "line break"),
        ({"headers": (("X", "a\0b"),)}, "invalid", "line break"),
        ({"headers": (("X", "ü"),)}, "invalid", "line break"),
        ({"headers": (("X", "a\u2028b"),)}, "invalid", "line break"),
        ({"headers": (("Host", "evil.example"),)}, "invalid", "written by the runner"),
        ({"headers": (("hOST", "evil.example"),)}, "invalid", "written by the runner"),
        ({"headers": (("Content-Length", "0"),)}, "invalid", "written by the runner"),
        ({"headers": (("Transfer-Encoding", "chunked"),)}, "invalid", "written by the runner"),
        ({"headers": (("Connection", "keep-alive"),)}, "invalid", "written by the runner"),
        ({"headers": (("Keep-Alive", "1"),)}, "invalid", "written by the runner"),
        ({"headers": (("TE", "trailers"),)}, "invalid", "written by the runner"),
        ({"headers": (("Trailer", "X"),)}, "invalid", "written by the runner"),
        ({"headers": (("Upgrade", "h2c"),)}, "invalid", "written by the runner"),
        ({"headers": (("Expect", "100-continue"),)}, "invalid", "written by the runner"),
        ({"headers": (("Proxy-Authorization", "x"),)}, "invalid", "written by the runner"),
        ({"headers": (("X", "y"),) * (MOST_HEADERS + 1)}, "too_large", "headers"),
        ({"headers": (("X", "y" * MOST_HEAD_BYTES),)}, "too_large", "headers"),
        ({"url": "http://example.com"}, "denied", "https"),
    ],
)
def test_requests_that_are_not_sent(change: dict[str, object], kind: Kind, reason: str) -> None:
    request = HttpsRequest(URL)._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(FetchFailed, match=reason) as caught:
        check_request(request, 4)
    assert caught.value.kind == kind
    assert str(caught.value).isprintable()


def test_the_most_that_is_sent() -> None:
    assert check_request(HttpsRequest(URL, "post", (("X", "y"),) * MOST_HEADERS, b"1234"), 4).method == "POST"
    value = "y" * (MOST_HEAD_BYTES - len("X: \r\n"))
    assert check_request(HttpsRequest(URL, headers=(("X", value),)), 0).headers == (("X", value),)


def test_a_request_is_written_byte_for_byte() -> None:
    request = HttpsRequest(
        "https://api.example.com:8443/a?b#c", "GET", (("X-Key", "v"), ("accept", "text/plain"))
    )
    assert write_request(request, parse_url(request.url))[1] == (
        b"GET /a?b HTTP/1.1\r\nHost: api.example.com:8443\r\nConnection: close\r\n"
        b"X-Key: v\r\naccept: text/plain\r\n"
        b"Accept-Encoding: identity\r\nUser-Agent: plugin-runner\r\n\r\n"
    )
    post = HttpsRequest(URL, "POST", body=b"abc")
    assert b"\r\nHost: api.example.com\r\n" in write_request(post, parse_url(URL))[1]
    assert b"\r\nContent-Length: 3\r\n" in write_request(post, parse_url(URL))[1]
    assert b"\r\nContent-Length: 0\r\n" in write_request(post._replace(body=None), parse_url(URL))[1]
    assert b"Content-Length" not in write_request(HttpsRequest(URL, "DELETE"), parse_url(URL))[1]


TEXTS = st.text(max_size=12) | st.text("aX-_./:?#%@ \t\r\n\0\\ü", max_size=12)


@given(TEXTS, st.sampled_from(METHODS) | TEXTS, st.just("X") | TEXTS, TEXTS)
def test_no_text_adds_a_line_to_a_request(path: str, method: str, name: str, value: str) -> None:
    try:
        request = check_request(HttpsRequest(f"https://example.com/{path}", method, ((name, value),)), 0)
    except FetchFailed:
        return
    first, *lines, end, nothing = write_request(request, parse_url(request.url))[1].split(b"\r\n")
    assert (end, nothing) == (b"", b"")
    assert first.split(b" ") == [method.encode(), b"/" + path.partition("#")[0].encode(), b"HTTP/1.1"]
    names = [line.partition(b":")[0].decode() for line in lines]
    assert names[:3] == ["Host", "Connection", name]
    assert set(names[3:]) <= {"Accept", "Accept-Encoding", "User-Agent", "Content-Length"}
    assert not any(character in line for line in lines for character in (b"\r", b"\n", b"\0"))


# --- redirects -------------------------------------------------------------------------------------

SECRETS = (("Authorization", "a"), ("Cookie", "c"), ("Content-Type", "t"), ("X", "x"), ("Accept", "y"))


@pytest.mark.parametrize(
    ("method", "status", "after"),
    [
        ("GET", 301, "GET"),
        ("GET", 307, "GET"),
        ("HEAD", 303, "HEAD"),
        ("HEAD", 301, "HEAD"),
        ("POST", 301, "GET"),
        ("POST", 302, "GET"),
        ("POST", 303, "GET"),
        ("POST", 307, "POST"),
        ("POST", 308, "POST"),
        ("PUT", 301, "PUT"),
        ("PUT", 303, "GET"),
        ("DELETE", 302, "DELETE"),
        ("DELETE", 303, "GET"),
    ],
)
def test_the_method_after_a_redirect(method: str, status: int, after: str) -> None:
    body = b"b" if method in ("POST", "PUT") else None
    found = redirect(HttpsRequest(URL, method, SECRETS, body), status, "/y")
    kept = method == after
    assert found.method == after
    assert found.url == "https://api.example.com/y"
    assert found.body == (body if kept else None)
    assert (("Content-Type", "t") in found.headers) is kept
    assert ("Authorization", "a") in found.headers  # the same host


@pytest.mark.parametrize(
    ("location", "url", "secrets"),
    [
        ("/y", "https://api.example.com/y", True),
        ("y?z", "https://api.example.com/y?z", True),
        ("?z", "https://api.example.com/x?z", True),
        ("https://api.example.com:443/", "https://api.example.com:443/", True),
        ("https://API.example.com/", "https://API.example.com/", True),
        ("https://api.example.com:8443/", "https://api.example.com:8443/", False),
        ("https://www.example.com/", "https://www.example.com/", False),
        ("//www.example.com/", "https://www.example.com/", False),
        ("/\xc3\xbc", "https://api.example.com/%C3%BC", True),
    ],
)
def test_where_a_redirect_leads(location: str, url: str, secrets: bool) -> None:
    found = redirect(HttpsRequest(URL, headers=SECRETS), 302, location)
    assert found.url == url
    assert (("Authorization", "a") in found.headers) is secrets
    assert (("Cookie", "c") in found.headers) is secrets
    assert (("X", "x") in found.headers) is secrets  # it may be a key
    assert ("Accept", "y") in found.headers


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("http://api.example.com/", "denied"),
        ("HTTP://api.example.com/", "denied"),
        ("ftp://api.example.com/", "denied"),
        ("javascript:alert(1)", "denied"),
        ("file:///etc/passwd", "denied"),
        ("https://user@api.example.com/", "protocol"),
        ("https://a_b.example/", "protocol"),
        ("https://[::1/", "protocol"),
        ("https://127.1/", "protocol"),
        ("/a b", "protocol"),
        ("/a\tb", "protocol"),
        ("/a\\b", "protocol"),
        ("\\\\evil.example/", "protocol"),
        ("", "protocol"),
    ],
)
def test_redirects_that_are_not_followed(location: str, kind: Kind) -> None:
    with pytest.raises(FetchFailed, match="the server redirects") as caught:
        redirect(HttpsRequest(URL), 302, location)
    assert caught.value.kind == kind
