"""Finds what holds for requests that leave it out: the operator's values, then those of the model's own file."""

from __future__ import annotations

import logging

from tandem.checkpoints.generation_config import GENERATION_CONFIG, generation_defaults
from tandem.engine.engine import Engine
from tandem.engine.generator import RequestDefaults
from tandem.runners.backends import backend_named
from tandem.services.role_config import RoleConfig
from tandem.speculation.types import InvalidField, Request

log = logging.getLogger("tandem.server")


def defaults_in_force(config: RoleConfig, engine: Engine | None = None) -> RequestDefaults:
    """Returns a server's defaults of requests, and logs where each is from.

    `engine`: of the target, if it is here. A file that asks for what its steps cannot do is left out. Raises ValueError
    if the operator asks for that, or if the file is damaged.
    """
    defaults, models = config.defaults, config.models
    if engine:
        engine.admit(Request(defaults.sampling))
    if config.generation_config == "auto" and (engine or models.model not in (None, models.draft.model)):
        found = defaults.over(generation_defaults(backend_named(models.backend).find(models.model)), GENERATION_CONFIG)
        try:
            if engine:
                engine.admit(Request(found.sampling))
            defaults = found
        except InvalidField as error:
            log.warning("%s is left out: %s", GENERATION_CONFIG, error)
    log.info("requests that do not say otherwise have: %s", defaults)
    return defaults
