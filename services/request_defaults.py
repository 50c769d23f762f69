"""Defaults of request fields: the operator's, else the model file's."""

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
    """Returns and logs the defaults, without those of the file that `engine` lacks. Raises ValueError."""
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
