"""Execution providers, one file each: `PROVIDER` says what it is called, needs, and why it is missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnxruntime as ort

from onnxlm.errors import ProviderError
from onnxlm.manifest import LOWERINGS, PRECISIONS, Manifest
from onnxlm.plugins import Registry
from onnxlm.runtime.providers._plugin import Plugin

_SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
_BASE_WHEEL = "onnxruntime"
# The version whose GroupQueryAttention takes `query_seqlens`, which prefill graphs of lowering ort give it.
ORT_LOWERING_SINCE = (1, 32)
_PRECISIONS_OF = {"float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class DeviceRequest:
    """What is asked of a provider's device.

    Attributes:
        device_id: Its number.
        memory_limit: Most bytes that ONNX Runtime's arena may take there; 0 is no limit.
        graph_capture: Record a decode step's kernels once and replay them.
    """

    device_id: int = 0
    memory_limit: int = 0
    graph_capture: bool = False


@dataclass(frozen=True)
class Provider:
    """One execution provider of ONNX Runtime.

    Attributes:
        ort_name: Its name in ONNX Runtime.
        wheel: The build of ONNX Runtime that has it; None where no wheel has.
        plugin: The package that adds it to any build; None where none does.
        needs: What it takes beside the wheel, for `install`.
        device: Device type of its buffers, as OrtValue spells it; also the file of the provider that has
            them.
        systems: Values of `sys.platform` where it exists; everywhere when empty.
        precisions: Packages that it runs.
        lowerings: The same; the first is the one to export for it.
        activations: Lowering -> element types of activations, which caches have too, that it has kernels for;
            a lowering that is not named goes with any.
        prefill_rows: Whether it runs packages quantized with --prefill-rows, whose prompts are products of
            8-bit integers.
        accepts: Fields of `DeviceRequest` that it carries out.
        backed_by: Names of the provider files that take the nodes it leaves, before the CPU does.
        options: Its options in ONNX Runtime for a request.
        device_used: Device number -> bytes of its memory that are in use, where that can be asked.
        device_count: How many devices it has; None where only ONNX Runtime knows.
        missing: Why it cannot work here although the wheel has it; None when nothing is known against it.
    """

    ort_name: str
    wheel: str | None = None
    plugin: Plugin | None = None
    needs: str = ""
    device: str = "cpu"
    systems: tuple[str, ...] = ()
    precisions: tuple[str, ...] = PRECISIONS
    lowerings: tuple[str, ...] = LOWERINGS
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefill_rows: bool = False
    accepts: tuple[str, ...] = ()
    backed_by: tuple[str, ...] = ()
    options: Callable[[DeviceRequest], Mapping[str, str]] = field(default=lambda request: {})
    device_used: Callable[[int], int | None] = field(default=lambda number: None)
    device_count: Callable[[], int | None] = field(default=lambda: None)
    missing: Callable[[], str | None] = field(default=lambda: None)

    @property
    def install(self) -> str:
        """What to do to get it."""
        ways = []
        if self.plugin is not None:
            ways.append(f"pip install {self.plugin.wheel}")
        if self.wheel == _BASE_WHEEL:
            ways.append(f"pip install {_BASE_WHEEL}")
        elif self.wheel is not None:
            swap = f"pip uninstall -y {_BASE_WHEEL} && pip install {self._wheel_wanted()}"
            ways.append(f"{swap} (one import name, two wheels)")
        where = f"on {self._system_names()}: " if self.systems else ""
        needs = f"{', ' if ways else ''}{self.needs}" if self.needs else ""
        return f"{where}{', or '.join(ways)}{needs}"

    def built_in(self) -> bool:
        """Whether the installed build of ONNX Runtime brings it, so that no plugin is needed."""
        if self.ort_name not in ort.get_available_providers():
            return False
        return not (self.plugin is not None and self.plugin.devices(self.ort_name))

    def unavailable(self) -> str | None:
        """Why this provider cannot be used in this process; None when it can."""
        if self.systems and sys.platform not in self.systems:
            return f"{self.ort_name} exists on {self._system_names()} only"
        if self.built_in():
            return self.missing()
        lacking = f"the installed onnxruntime {ort.__version__} has no {self.ort_name}"
        if self.plugin is None:
            return lacking
        problem = self.plugin.problem(self.ort_name)
        return None if problem is None else f"{lacking}, and {problem}"

    def check_package(self, name: str, manifest: Manifest) -> None:
        """Refuse a package that this provider cannot run.

        Args:
            name: The provider's name, for the message.
            manifest: Of the package.

        Raises:
            ProviderError: Names what it runs.
        """
        for what, found, allowed, option in (
            ("lowering", manifest.lowering, self.lowerings, "--lowering"),
            ("precision", manifest.precision, self.precisions, "--precision"),
        ):
            if found not in allowed:
                raise ProviderError(
                    f"execution provider '{name}' does not run packages of this {what}",
                    found=found,
                    allowed=", ".join(allowed),
                    fix=f"export the model with {option} {allowed[0]}",
                )
        self._check_activations(name, manifest)
        made = manifest.quantization
        if made is not None and made.prefill_weights != "shared" and not self.prefill_rows:
            raise ProviderError(
                f"execution provider '{name}' has no kernels for prefill weights of their own",
                found=made.prefill_weights,
                allowed="shared",
                fix="quantize without --prefill-rows",
            )

    def check_version(self, manifest: Manifest) -> None:
        """Refuse a package that the installed ONNX Runtime is too old for; it would print a paragraph.

        Raises:
            ProviderError: Names the version it takes.
        """
        found = re.match(r"(\d+)\.(\d+)", ort.__version__)
        if manifest.lowering != "ort" or found is None:
            return
        if (int(found[1]), int(found[2])) < ORT_LOWERING_SINCE:
            other = next(name for name in self.lowerings if name != "ort")
            raise ProviderError(
                f"packages of lowering ort need onnxruntime >= {_since()}",
                found=ort.__version__,
                fix=f"upgrade it, or export with --lowering {other}",
            )

    def check_request(self, name: str, request: DeviceRequest) -> None:
        """Refuse what this provider cannot carry out.

        Args:
            name: The provider's name, for the message.
            request: What is asked of its device.

        Raises:
            ProviderError: It has no such option, or no such device.
        """
        asked = {
            "device_id": request.device_id != 0,
            "memory_limit": request.memory_limit != 0,
            "graph_capture": request.graph_capture,
        }
        accepted = self.accepted()
        for option, given in asked.items():
            if given and option not in accepted:
                words = option.replace("_", " ")
                plugin = self.plugin if option in self.accepts else None
                raise ProviderError(
                    f"execution provider '{name}' has no {words}",
                    allowed=f"providers that have: {', '.join(_accepting(option))}",
                    fix=None if plugin is None else f"take its plugin: pip install {plugin.wheel}",
                )
        count = self._devices()
        if count is not None and not 0 <= request.device_id < count:
            raise ProviderError(
                f"execution provider '{name}' has no such device",
                found=request.device_id,
                allowed=f"0 to {count - 1}" if count > 1 else 0,
            )

    def accepted(self) -> tuple[str, ...]:
        """Fields of `DeviceRequest` that it carries out as it is installed here.

        A plugin's device is taken from a list. A build that brings the provider itself has no list, so that
        the number has to be one of the provider's options.
        """
        if self.plugin is None or not self.built_in():
            return self.accepts
        numbered = "device_id" in self.options(DeviceRequest())
        return tuple(option for option in self.accepts if numbered or option != "device_id")

    def _check_activations(self, name: str, manifest: Manifest) -> None:
        """The type is that of the caches: a quantized package is made of one of either type."""
        found = sorted({state.dtype for state in manifest.states})
        allowed = self.activations.get(manifest.lowering)
        if allowed is None or set(found) <= set(allowed):
            return
        kind, made = _PRECISIONS_OF[allowed[0]], manifest.quantization
        options = kind if made is None else f"{made.scheme} --activations {kind}"
        wanted = f"export with --precision {options}"
        others = [other for other in self.lowerings if other not in self.activations]
        raise ProviderError(
            f"execution provider '{name}' does not run lowering {manifest.lowering} in this type",
            found=", ".join(found),
            allowed=", ".join(allowed),
            fix=f"{wanted}, or export with --lowering {others[0]}" if others else wanted,
        )

    def _devices(self) -> int | None:
        if self.plugin is not None and not self.built_in():
            return len(self.plugin.devices(self.ort_name))
        return self.device_count()

    def _wheel_wanted(self) -> str:
        if "ort" in self.lowerings:  # quoted: a shell would redirect to a file
            return f'"{self.wheel}>={_since()}"'
        return str(self.wheel)

    def _system_names(self) -> str:
        return " and ".join(_SYSTEMS[system] for system in self.systems)


_PROVIDERS = Registry(
    __name__, "PROVIDER", Provider, "execution provider is not known", ProviderError
)


def provider_names() -> list[str]:
    """Names a user may ask for."""
    return _PROVIDERS.names()


def find_provider(name: str) -> Provider:
    """The provider in file `name`, whether or not it is available.

    Raises:
        ProviderError: There is no such file.
    """
    return _PROVIDERS.find(name)


def require_provider(name: str) -> Provider:
    """The provider in file `name`, which must be available.

    Raises:
        ProviderError: It is not known, or not available; says why and how to get it.
    """
    provider = find_provider(name)
    reason = provider.unavailable()
    if reason is not None:
        raise ProviderError(
            f"execution provider '{name}' cannot be used: {reason}", fix=provider.install
        )
    return provider


def _accepting(option: str) -> list[str]:
    return [name for name in provider_names() if option in find_provider(name).accepted()]


def _since() -> str:
    return ".".join(map(str, ORT_LOWERING_SINCE))
