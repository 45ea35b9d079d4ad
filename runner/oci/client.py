"""RegistryClient: the requests of the OCI distribution protocol, to a registry that may be hostile.

Only the registry's own origin gets credentials. It may send us to other hosts for a blob or a token: these
are dialled only if every address of theirs is public, or the person named them (`RegistryAccess.hosts`), and
get no credentials, except a token server that the person named. Every answer has a bound on its size, every
digest is computed here, and `RegistryAccess.deadline` ends the whole exchange."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any, NamedTuple, TypeVar

import h11
import httpcore
import httpx
import trio
from httpcore._async import connection as making

from runner.oci.artifact import (
    INDEX,
    MANIFEST,
    MOST_MANIFEST_BYTES,
    SIGNATURE,
    Descriptor,
    add_to_index,
    digest_of,
    fallback_tag,
    read_referrers,
)
from runner.oci.credentials import DOCKER_HUB, Credentials, find_credentials
from runner.oci.reference import Reference
from runner.package.fault import PackageFault
from runner.protocol.https.fetch import resolve_name
from sandbox.document.diagnostic import DocumentError, printable, quoted
from sandbox.document.read import parse
from sandbox.network.addresses import vet
from sandbox.network.hosts import read_address
from sandbox.network.http_connection import HttpConnection

_HUB_SERVER, _HUB_TOKENS = "registry-1.docker.io", httpx.URL("https://auth.docker.io")
_CHUNK_BYTES = 1 << 18
_MOST_TOKEN_BYTES = 64 << 10
_MOST_REDIRECTS = 5
_MOST_PAGES = 8
_INDEX_TRIES = 12
# The rule of a fault that may be gone a moment later. Some registries answer so, or that a digest is wrong,
# while another client writes the same.
FAILED = "registry_failed"
_SILENCE_SECONDS = 30.0  # between two bytes, in either direction
# Their time must not grow with the square of a header: a name is tried from its first letter only, and a link
# has no "<" in it.
_CHALLENGE = re.compile(r'(Bearer|Basic)\s|\b([a-z]{1,32})="([^"]{0,1024})"', re.IGNORECASE)
_ERROR_CODE = re.compile(r"[A-Z_]{2,40}")
_TOKEN = re.compile(r"[!-~]{1,32768}")
_NEXT_PAGE = re.compile(r'<([^<>]{1,2048})>\s*;\s*rel="?next"?')
_PIECES = "application/octet-stream"

_MOST_HEAD_BYTES = 16 << 10  # of the headers of an answer


class _GuardedConnection(httpcore.AsyncHTTP11Connection):
    """No deadline ends what h11 does with a hostile header."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._h11_state = HttpConnection(h11.CLIENT, _MOST_HEAD_BYTES)


# httpcore has no other place to say which connections it makes. Nothing else of this process uses it.
if not issubclass(vars(making)["AsyncHTTP11Connection"], httpcore.AsyncHTTP11Connection):
    raise ImportError("httpcore makes its connections elsewhere: this version was not tried")
making.AsyncHTTP11Connection = _GuardedConnection  # type: ignore[attr-defined]

Result = TypeVar("Result")
Content = bytes | Callable[[], AsyncIterator[bytes]]


class RegistryAccess(NamedTuple):
    """How a registry may be reached."""

    ca: str = ""  # a PEM file of certificates that are trusted in place of the system's
    plain_http: bool = False  # without TLS, as localhost is asked unless there is a `ca`
    # HOST or HOST:PORT that the registry may send us to: for tokens, or in a private network.
    hosts: tuple[str, ...] = ()
    deadline: float = 600.0  # seconds for everything together


USUAL_ACCESS = RegistryAccess()


@asynccontextmanager
async def open_registry(
    reference: Reference,
    access: RegistryAccess = USUAL_ACCESS,
    environ: Mapping[str, str] | None = None,
    *,
    push: bool = False,
) -> AsyncIterator[RegistryClient]:
    """A client for the repository of `reference`. `environ`: says where credentials are. Raises PackageFault,
    also for what goes wrong inside the context: nothing of httpx, ssl or a clock leaves it."""
    environ = os.environ if environ is None else environ
    credentials = await trio.to_thread.run_sync(find_credentials, reference, environ)
    try:
        with trio.fail_after(access.deadline):
            async with httpx.AsyncClient(
                verify=_tls(access.ca), trust_env=False, timeout=httpx.Timeout(_SILENCE_SECONDS)
            ) as client:
                yield RegistryClient(client, reference, access, credentials, push=push)
    except (trio.TooSlowError, httpx.TimeoutException):
        message = f"{reference.registry} took too long: the limit is {access.deadline:g} s for everything"
        raise PackageFault("registry_slow", message, "try again, or raise --deadline") from None
    except httpx.ConnectError as error:
        message = f"{reference.registry} cannot be reached: {printable(str(error))[:300]}"
        hint = "check its name; if it has a certificate authority of its own, name that with --ca FILE"
        raise PackageFault("registry_unreachable", message, hint) from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ssl.SSLError, ValueError):
        # ValueError: of a host name that is none, by idna and urllib.
        # Not the text of the error: it may repeat what the server sent, and that what we sent.
        message = f"{reference.registry} does not speak HTTP as a registry does, or broke off"
        raise PackageFault("registry_answer", message, "try again") from None


def wait_for(task: Callable[[], Awaitable[Result]]) -> Result:
    """Returns what a task with registries returns, for callers that are not on trio."""
    return trio.run(task)


def call_in_main(function: Callable[[], Result]) -> Result:
    """Call something from a thread of such a task in the thread of `wait_for`, which ^C reaches."""
    return trio.from_thread.run_sync(function)


def _tls(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError):
        message = f"--ca {printable(ca)}: it has no certificates in PEM format that can be read"
        raise PackageFault("registry_ca", message, "name the file of the authority's certificate") from None


class RegistryClient:
    def __init__(
        self,
        client: httpx.AsyncClient,
        reference: Reference,
        access: RegistryAccess,
        credentials: Credentials | None,
        *,
        push: bool,
    ) -> None:
        self._client, self._access, self._credentials = client, access, credentials
        self._shown = reference.registry
        self._repository = reference.repository
        self._scope = f"repository:{reference.repository}:{'pull,push' if push else 'pull'}"
        server = _HUB_SERVER if reference.registry == DOCKER_HUB else reference.registry
        host = server if server.endswith("]") else server.rpartition(":")[0] or server
        self._is_plain = access.plain_http or (_is_loopback(host) and not access.ca)
        self._origin = httpx.URL(f"{'http' if self._is_plain else 'https'}://{server}")
        self._authorization = ""  # for the registry's own origin

    # --- what a registry has ------------------------------------------------------------------------------

    async def get_manifest(
        self, version: str, kinds: Sequence[str] = (MANIFEST, INDEX)
    ) -> tuple[bytes, str] | None:
        """The bytes of a manifest by tag or digest, and their digest. None: there is none. Raises
        PackageFault, also if they are not those of the digest that was asked for."""
        url = self._url(f"manifests/{version}")
        async with self._ask("GET", url, {"Accept": ", ".join(kinds)}, missing=True) as answer:
            if answer.status_code == 404:
                return None
            raw = await _read(answer, MOST_MANIFEST_BYTES, "a manifest")
        digest = digest_of(raw)
        told = answer.headers.get("Docker-Content-Digest", digest)
        for wanted in (version if version.startswith("sha256:") else digest, told):
            if wanted != digest:
                message = (
                    f"{self._shown} gave a manifest that is not {quoted(wanted, 80)}: its digest is {digest}"
                )
                hint = "somebody or something changed it on the way; do not use it"
                raise PackageFault("registry_digest", message, hint)
        return raw, digest

    async def get_blob(self, blob: Descriptor, file: IO[bytes]) -> None:
        """Write what has this descriptor to a file. Raises PackageFault if anything else comes."""
        sha256 = hashlib.sha256()

        def take(data: bytes) -> None:
            sha256.update(data)
            file.write(data)

        async with self._ask("GET", self._url(f"blobs/{blob.digest}"), {}) as answer:
            size = await _receive(answer, blob.size, take)
        if size != blob.size:
            more = "more" if size > blob.size else f"{size}"
            message = f"{self._shown} gave {more} bytes for a blob that has {blob.size}"
            raise PackageFault("registry_digest", message, "try again; do not use another copy of it")
        if f"sha256:{sha256.hexdigest()}" != blob.digest:
            message = f"{self._shown} gave other bytes than those of {blob.digest}"
            raise PackageFault("registry_digest", message, "somebody or something changed them")

    async def referrers(self, digest: str) -> list[Descriptor]:
        """The manifests of the signatures of a package: those that the registry lists, or those of the
        fallback tag. Raises PackageFault."""
        found: list[Descriptor] = []
        url: httpx.URL | None = self._url(f"referrers/{digest}").copy_add_param("artifactType", SIGNATURE)
        for _ in range(_MOST_PAGES):
            if url is None:
                break
            async with self._ask("GET", url, {"Accept": INDEX}, missing=True) as answer:
                if answer.status_code == 404:
                    break
                found += read_referrers(await _read(answer, MOST_MANIFEST_BYTES, "a list of referrers"))
                following = _NEXT_PAGE.search(answer.headers.get("Link", ""))
                url = None if following is None else self._own_url(following[1])
        if not found and (index := await self.get_manifest(fallback_tag(digest))) is not None:
            found = read_referrers(index[0])
        return list(dict.fromkeys(found))

    # --- what is given to a registry ----------------------------------------------------------------------

    async def put_blob(self, digest: str, size: int, content: Content) -> bool:
        """Returns False if the registry has it already. Raises PackageFault."""
        async with self._ask("HEAD", self._url(f"blobs/{digest}"), {}, missing=True) as answer:
            if answer.status_code == 200:
                return False
        async with self._ask("POST", self._url("blobs/uploads/"), {"Content-Length": "0"}) as answer:
            place = self._own_url(answer.headers.get("Location", ""))
        headers = {"Content-Type": _PIECES, "Content-Length": str(size)}
        async with self._ask("PUT", place.copy_add_param("digest", digest), headers, content):
            return True

    async def put_manifest(self, version: str, raw: bytes, kind: str = MANIFEST) -> str:
        """Returns the subject that the registry has listed it for, "" if it did not. Raises PackageFault."""
        async with self._ask("PUT", self._url(f"manifests/{version}"), {"Content-Type": kind}, raw) as answer:
            return str(answer.headers.get("OCI-Subject", ""))

    async def add_referrer(self, subject: str, added: Descriptor) -> None:
        """List a signature under the fallback tag of its package. Raises PackageFault.

        A registry has no way to change an index only if nobody else has. So it is read again, twice: who
        wrote at the same time has finished by then, and whose entry is gone writes once more."""
        tag = fallback_tag(subject)
        for _ in range(_INDEX_TRIES):
            began = trio.current_time()
            index = await self.get_manifest(tag)
            if index is None or added not in read_referrers(index[0]):
                new = add_to_index(None if index is None else index[0], added)
                await self.put_manifest(tag, new, INDEX)
                if not await self._is_listed(tag, added):
                    continue
            # As long as another client's reading and writing may take, twice over.
            await trio.sleep(2 * (trio.current_time() - began))
            if await self._is_listed(tag, added):
                return
        message = f"the signature is in {self._shown}, and other clients keep removing it from the list"
        raise PackageFault("registry_contended", message, "push again")

    async def _is_listed(self, tag: str, added: Descriptor) -> bool:
        index = await self.get_manifest(tag)
        return index is not None and added in read_referrers(index[0])

    # --- requests -----------------------------------------------------------------------------------------

    def _url(self, path: str) -> httpx.URL:
        return self._origin.copy_with(raw_path=f"/v2/{self._repository}/{path}".encode())

    def _own_url(self, text: str) -> httpx.URL:
        """An address that the registry gave, which has to be its own. Raises PackageFault."""
        url = self._origin.join(text) if text else self._origin.copy_with(host="")
        if url.host != self._origin.host:
            message = f"{self._shown} wants an upload or a page at {quoted(url.host)}: only itself is asked"
            raise PackageFault("registry_redirect", message)
        # Behind a proxy some registries give another scheme or port of theirs.
        return self._origin.copy_with(raw_path=url.raw_path)

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        content: Content = b"",
        *,
        missing: bool = False,
    ) -> AsyncIterator[httpx.Response]:
        """The answer to a request, with its body still to be read. `missing`: 404 is an answer too. Raises
        PackageFault for every other one but success."""
        answer = await self._send(method, url, headers, content)
        try:
            if answer.status_code == 401:
                await answer.aclose()
                await self._log_in(answer.headers.get_list("WWW-Authenticate"))
                answer = await self._send(method, url, headers, content)
            for _ in range(_MOST_REDIRECTS):
                if not (method in ("GET", "HEAD") and answer.is_redirect):
                    break
                await answer.aclose()
                url = url.join(answer.headers.get("Location", ""))
                answer = await self._send(method, url, headers, content)
            if not (answer.is_success or (missing and answer.status_code == 404)):
                raise await self._refusal(answer)
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise PackageFault("registry_answer", f"{self._shown} compressed its answer unasked")
            yield answer
        finally:
            await answer.aclose()

    async def _send(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], content: Content
    ) -> httpx.Response:
        sent = {"Accept-Encoding": "identity", **headers}
        extensions: dict[str, Any] = {}
        if _is_same_origin(url, self._origin):
            if self._authorization:
                sent["Authorization"] = self._authorization
        else:
            url, extensions = await self._elsewhere(url, sent)
        data = content if isinstance(content, bytes) else content()
        request = self._client.build_request(method, url, headers=sent, content=data, extensions=extensions)
        return await self._client.send(request, stream=True, follow_redirects=False)

    async def _elsewhere(self, url: httpx.URL, sent: dict[str, str]) -> tuple[httpx.URL, dict[str, Any]]:
        """The address to dial for another host than the registry's, if it may be dialled. Its name is looked
        up once, so that what was judged is what is dialled. Raises PackageFault."""
        name = url.host
        plain = url.scheme == "http" and (self._access.plain_http or (self._is_plain and _is_loopback(name)))
        if url.scheme != "https" and not plain:
            message = f"{self._shown} sends us to {quoted(name)} without TLS"
            raise PackageFault("registry_redirect", message, "it is not followed")
        if self._is_named(url):
            return url, {}
        try:
            addresses = await resolve_name(name)
        except (OSError, UnicodeError):
            addresses = ()
        for address in addresses:
            if reason := vet(address):
                message = f"{self._shown} sends us to {quoted(name)}, and {address} {reason}"
                hint = f"if that is meant, add --allow-host {printable(name)[:100]}"
                raise PackageFault("registry_redirect", message, hint)
        if not addresses:
            message = f"{self._shown} sends us to {quoted(name)}, which has no address"
            raise PackageFault("registry_redirect", message)
        sent["Host"] = url.netloc.decode("ascii")
        return url.copy_with(host=addresses[0]), {"sni_hostname": name}

    def _is_named(self, url: httpx.URL) -> bool:
        port = url.port or (443 if url.scheme == "https" else 80)
        return not {url.host, f"{url.host}:{port}"}.isdisjoint(self._access.hosts)

    async def _refusal(self, answer: httpx.Response) -> PackageFault:
        status, code = answer.status_code, ""
        try:
            found: Any = parse("answer", await _read(answer, MOST_MANIFEST_BYTES, "an error"), "json").data
            code = str(found["errors"][0]["code"])
        except (PackageFault, DocumentError, KeyError, IndexError, TypeError):
            pass
        # Only the code: the registry's own text may repeat what we sent.
        told = f" ({code})" if _ERROR_CODE.fullmatch(code) else ""
        if status in (401, 403):
            message = f"{self._shown} refuses access to {self._repository}{told}"
            hint = f"log in with docker login {self._shown} or podman login {self._shown}"
            return PackageFault("registry_denied", message, hint)
        if status == 404:
            message = f"{self._shown} does not have what was asked for of {self._repository}{told}"
            return PackageFault("registry_missing", message, "check the reference")
        if answer.is_redirect:
            message = f"{self._shown} redirects more than {_MOST_REDIRECTS} times, or an upload"
            return PackageFault("registry_redirect", message)
        rule = FAILED if status >= 500 or code == "DIGEST_INVALID" else "registry_answer"
        return PackageFault(rule, f"{self._shown} answered with status {status}{told}", "try again")

    # --- who we are ---------------------------------------------------------------------------------------

    async def _log_in(self, challenges: list[str]) -> None:
        """Find the value of Authorization for the registry. Raises PackageFault."""
        kinds, values = _parse_challenges(challenges)
        known = self._credentials
        if "bearer" in kinds and values.get("realm"):
            self._authorization = f"Bearer {await self._get_token(values)}"
        elif "basic" in kinds and known is not None and known.user:
            self._authorization = known.basic
        # Otherwise the second answer is a 401 too, and says so.

    async def _get_token(self, values: Mapping[str, str]) -> str:
        url, known = self._origin.join(values["realm"]), self._credentials
        own = _is_same_origin(url, self._origin) or self._is_named(url)
        own = own or (self._shown == DOCKER_HUB and _is_same_origin(url, _HUB_TOKENS))
        if known is not None and not own:
            message = f"{self._shown} wants your credentials sent to {quoted(url.host)}"
            hint = f"if that is its token server, add --allow-host {printable(url.host)[:100]}"
            raise PackageFault("registry_redirect", message, hint)
        fields = {"service": values.get("service", ""), "scope": self._scope, "client_id": "plugin-runner"}
        sent = {"Accept": "application/json", "Accept-Encoding": "identity"}
        extensions: dict[str, Any] = {}
        if not _is_same_origin(url, self._origin):
            url, extensions = await self._elsewhere(url, sent)
        if known is not None and known.identity_token:
            fields |= {"grant_type": "refresh_token", "refresh_token": known.identity_token}
            request = self._client.build_request(
                "POST", url, data=fields, headers=sent, extensions=extensions
            )
        else:
            if known is not None:
                sent["Authorization"] = known.basic
            url = url.copy_merge_params(fields)
            request = self._client.build_request("GET", url, headers=sent, extensions=extensions)
        answer = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            if not answer.is_success:
                raise await self._refusal(answer)
            found = parse("token", await _read(answer, _MOST_TOKEN_BYTES, "a token"), "json").data
        except DocumentError:
            found = {}
        finally:
            await answer.aclose()
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise PackageFault("registry_answer", f"the token server of {self._shown} gave no token")
        return token


async def _receive(answer: httpx.Response, most: int, take: Callable[[bytes], object]) -> int:
    """Give the body of an answer to `take`. Returns its size; one above `most` is that at which it was
    stopped. Raises OSError if it cannot be kept."""
    size, failure = 0, None
    # Cancelled, not left by a break or an exception: generators inside httpx would stay unfinished.
    with trio.CancelScope() as scope:
        async for data in answer.aiter_raw(_CHUNK_BYTES):
            size += len(data)
            try:
                if size <= most and failure is None:
                    take(data)
            except OSError as error:
                failure = error
            if size > most or failure is not None:
                scope.cancel()
    if failure is not None:
        raise failure
    return size


async def _read(answer: httpx.Response, most: int, what: str) -> bytes:
    found = bytearray()
    if await _receive(answer, most, found.extend) > most:
        raise PackageFault("registry_answer", f"the registry gave {what} of more than {most} bytes")
    return bytes(found)


def _parse_challenges(challenges: list[str]) -> tuple[set[str], dict[str, str]]:
    """The kinds of authentication that a registry takes, in lower case, and the values of the first
    Bearer."""
    kinds: set[str] = set()
    values: dict[str, str] = {}
    kind = ""
    for found in _CHALLENGE.finditer(", ".join(challenges)[:8192]):
        if found[1]:
            kind = found[1].lower()
            kinds.add(kind)
        elif kind == "bearer":
            values.setdefault(found[2].lower(), found[3])
    return kinds, values


def _is_same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def _is_loopback(host: str) -> bool:
    address = read_address(host.strip("[]"))
    return host == "localhost" if address is None else address.is_loopback
