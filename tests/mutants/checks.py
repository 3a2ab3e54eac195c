"""Faults of the checks themselves: what they would then no longer see."""

from mutants.fault import Mutant, faults

CHECKS = [
    *faults(
        "checks/measured.py",
        "checks",
        Mutant(
            "the measured mask looks at one path only",
            "    for path in subject.paths:\n        try:\n            with subject.on(path):\n"
            "                records.append(judge(subject, path))",
            "    for path in subject.paths[:1]:\n        try:\n            with subject.on(path):\n"
            "                records.append(judge(subject, path))",
            "checks_paths",
        ),
        Mutant(
            "a mask that hides too much is fine",
            "            missing.append(distance)",
            "            pass",
            "zoo_models::test_the_right_check_names_the_right_cause",
        ),
    ),
    *faults(
        "checks/modes.py",
        "checks",
        Mutant(
            "gradients of one path only",
            '    for path in subject.paths:\n        for mode in ("eval", "train"):',
            '    for path in subject.paths[:1]:\n        for mode in ("eval", "train"):',
            "checks_paths",
        ),
    ),
    *faults(
        "checks/agreement.py",
        "checks",
        Mutant(
            "an exported form is run on the example it was made of",
            "other = subject.fresh(tokens, 11)",
            "other = tokens",
            "checks_agreement",
        ),
        Mutant(
            "exported forms are not compared",
            "                off = rounding.apart(mine, wanted)",
            "                off = 0.0",
            "checks_agreement",
        ),
        Mutant(
            "paths are compared without padding only",
            'found["right padding"] = (case.tokens, case.real)',
            "pass",
            "checks_agreement",
        ),
    ),
    *faults(
        "checks/parts.py",
        "checks",
        Mutant(
            "no encoder by itself",
            "if two_parts(subject.model):",
            "if False:",
            "checks_models::test_an_encoder_is_checked_by_itself",
        ),
        Mutant(
            "half precision is not checked in float32",
            "if torch.finfo(subject.dtype).eps > torch.finfo(torch.float32).eps:",
            "if False:",
            "checks_models::test_half_precision_is_checked_in_float32_too",
        ),
    ),
    *faults(
        "checks/paths.py",
        "checks",
        Mutant(
            "the headwise path is forgotten",
            'if hasattr(home, "ALL_ATTENTION_FUNCTIONS"):',
            "if False:",
            "checks_models::test_an_encoder_is_checked_by_itself",
        ),
    ),
]
