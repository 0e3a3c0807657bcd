"""A name tells whether a file is looked at, and whether the look must be inside."""

from __future__ import annotations

import pytest

from agent_sandbox.policy.secret_names import KEY, NAME, TOKEN, is_template, suspicion_of


@pytest.mark.parametrize(
    "name",
    [
        *(
            ".env",
            ".ENV",
            ".env.local",
            ".env.production",
            ".env.development",
            ".env_prod",
            ".env-ci",
            ".env.bak",
            ".env~",
            "..env.swp",
            "#.env#",
        ),
        *("prod.env", "database.env", ".envrc", ".dev.vars", ".npmrc", ".pypirc", ".netrc", "_netrc", ".git-credentials", ".htpasswd"),
        *("terraform.tfstate", "terraform.tfstate.backup", "terraform.tfstate.1700000000.backup", "prod.tfstate", "prod.tfvars"),
        *(
            "prod.auto.tfvars",
            "prod.tfvars.json",
            "credentials.json",
            "credentials",
            "Credentials.csv",
            "client_secret_12.json",
            "creds.yml",
        ),
        *("secrets.yml", "secrets.yaml", "secrets.json", "secrets.toml", "secrets.prod.yaml", "app-secrets.json", "my_secret.txt"),
        *(".vault-pass", ".vault_password", "vault-password.txt", "master.key", "kubeconfig", "kubeconfig.yaml", "prod.kubeconfig"),
        *(
            "cert.p12",
            "cert.PFX",
            "release.jks",
            "upload.keystore",
            "site.ppk",
            "vault.kdbx",
            "service.keytab",
            "jupyter_server_config.json",
        ),
        *("secrets.yml.bak", "credentials.json.old", "release.jks~"),
    ],
)
def test_a_name_that_is_always_secret(name: str) -> None:
    suspicion = suspicion_of(name)
    assert suspicion is not None and suspicion.by == NAME


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *((name, KEY) for name in ("server.pem", "tls.key", "ca.crt", "key.der", "AuthKey_1.p8", "secring.gpg", "key.asc", "vpn.ovpn")),
        *(
            (name, KEY)
            for name in (
                "id_rsa",
                "id_ed25519",
                "id_rsa.old",
                "id_ecdsa_sk",
                "deploy",
                "KEY",
                "server.pem.bak",
                "tls.key~",
                ".env-sample",
                ".environment",
            )
        ),
        *(
            (name, TOKEN)
            for name in ("service-account.json", "firebase-adminsdk-x.json", "api_key.txt", "auth.json", ".mcp.json", "pip.conf")
        ),
        *((name, TOKEN) for name in ("gradle.properties", ".yarnrc.yml", "settings.local.json", "tokens.yaml", "login.conf")),
    ],
)
def test_a_name_that_is_secret_if_the_content_is(name: str, by: str) -> None:
    suspicion = suspicion_of(name)
    assert suspicion is not None and suspicion.by == by


@pytest.mark.parametrize(
    "name",
    [
        *(".env.example", ".env.sample", ".env.template", ".env.dist", ".env.local.example", "example.env"),
        *("id_rsa.pub", "id_ed25519.pub", "secrets.example.yaml", "secrets.yml.example", "terraform.tfvars.example", "debug.keystore"),
        *("truststore.jks", "secrets.py", "credentials.go", "key.ts", "README.md", "package.json", "app.yaml", "environment.yml", "x.png"),
    ],
)
def test_an_ordinary_name(name: str) -> None:
    assert suspicion_of(name) is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "...", "\n", "a\nb.pem", "\udcff.env", "~", "#", ".swp", "~" * 300, "." * 255, ".bak.bak.bak"]
)
def test_an_odd_name_is_no_trouble(name: str) -> None:
    suspicion_of(name)


def test_a_name_with_odd_bytes_is_judged_by_the_rest() -> None:
    assert suspicion_of("\udcff.env") is not None and suspicion_of("a\nb.pem") is not None


@pytest.mark.parametrize("directory", [".ssh/", "a/.aws/b/", "secrets/", "a/.envs/.production/"])
@pytest.mark.parametrize("name", ["config", "db_password.txt", ".django", "values.yaml"])
def test_data_in_a_directory_for_secrets_is_suspected(directory: str, name: str) -> None:
    suspicion = suspicion_of(name, directory=directory)
    assert suspicion is not None and suspicion.by == NAME
    outside = suspicion_of(name, directory="src/")
    assert outside is None or outside.by != NAME


def test_code_in_a_package_called_secrets_is_not() -> None:
    assert suspicion_of("vault.py", directory="app/secrets/") is None
    assert suspicion_of("config.py", directory="app/.ssh/") is not None


def test_templates() -> None:
    assert is_template(".env.example") and not is_template(".env")
