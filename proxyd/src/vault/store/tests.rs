//! The store on a real file: keys, versions, removal, rows that change places.

use super::*;

fn material(byte: u8) -> Material {
    Material::Key(Zeroizing::new(vec![byte; 32]))
}

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

fn texts(values: &[Secret]) -> Vec<&[u8]> {
    values.iter().map(Secret::expose_secret).collect()
}

#[test]
fn values_come_back_and_the_last_two_versions_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), &material(1)).unwrap();

    for value in ["SECRET-CANARY-1", "SECRET-CANARY-2", "SECRET-CANARY-3"] {
        store.put("github", &secret(value), 1_700_000_000).unwrap();
    }

    let values = store.values("github").unwrap();
    assert_eq!(texts(&values), [b"SECRET-CANARY-3", b"SECRET-CANARY-2"]);
    let listed = store.list().unwrap();
    assert_eq!((listed.len(), listed[0].version), (1, 3));
    assert_eq!(listed[0].created_at, "2023-11-14T22:13:20Z");
}

#[test]
fn a_closed_vault_opens_with_its_own_key_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), &material(1)).unwrap();
    store.put("github", &secret("SECRET-CANARY-1"), 0).unwrap();
    let before = store.placeholder_bytes("lease_a", "github");
    drop(store);

    let wrong = Store::open(dir.path(), &material(2));
    let right = Store::open(dir.path(), &material(1)).unwrap();

    assert!(matches!(wrong, Err(VaultError::Key(_))));
    assert_eq!(texts(&right.values("github").unwrap()), [b"SECRET-CANARY-1"]);
    assert_eq!(right.placeholder_bytes("lease_a", "github"), before);
    assert_ne!(right.placeholder_bytes("lease_b", "github"), before);
    assert_ne!(right.placeholder_bytes("lease_agit", "hub"), before);
}

#[test]
fn no_file_of_the_vault_holds_a_value_before_or_after_its_removal() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), &material(1)).unwrap();
    store.put("github", &secret("SECRET-CANARY-1"), 0).unwrap();
    store.put("other", &secret("SECRET-CANARY-2"), 0).unwrap();
    store.remove("github").unwrap();

    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(!bytes.windows(13).any(|window| window == b"SECRET-CANARY"));
    }
    assert!(matches!(store.values("github"), Err(VaultError::Missing(_))));
    assert!(matches!(store.remove("github"), Err(VaultError::Missing(_))));
    assert_eq!(store.put("github", &secret("SECRET-CANARY-3"), 0).unwrap().version, 2);
}

#[test]
fn rows_cannot_change_places() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), &material(1)).unwrap();
    store.put("github", &secret("SECRET-CANARY-1"), 0).unwrap();
    store.put("evil", &secret("SECRET-CANARY-2"), 0).unwrap();

    store
        .db
        .execute(
            "UPDATE secret SET sealed = (SELECT sealed FROM secret WHERE name = 'github')
             WHERE name = 'evil'",
            [],
        )
        .unwrap();

    assert!(matches!(store.values("evil"), Err(VaultError::Failed(_))));
    assert!(store.values("github").is_ok());
}

#[test]
fn names_and_values_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), &material(1)).unwrap();
    let long = "x".repeat(SECRET_BYTES_MAX + 1);
    for (name, value) in [
        ("", "SECRET-CANARY"),
        ("a b", "SECRET-CANARY"),
        ("a\n", "SECRET-CANARY"),
        ("github", "7 bytes"),
        ("github", &long),
    ] {
        let outcome = store.put(name, &secret(value), 0);
        assert!(matches!(outcome, Err(VaultError::Invalid(_))), "{name:?}");
    }
}

#[test]
fn the_last_use_is_written_at_most_once_a_minute() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), &material(1)).unwrap();
    store.put("github", &secret("SECRET-CANARY-1"), 0).unwrap();
    let last = |store: &Store| store.list().unwrap()[0].last_used_at.clone();

    assert_eq!(last(&store), None);
    store.used("github", 100).unwrap();
    store.used("github", 130).unwrap();
    assert_eq!(last(&store).unwrap(), "1970-01-01T00:01:40Z");
    store.used("github", 160).unwrap();
    assert_eq!(last(&store).unwrap(), "1970-01-01T00:02:40Z");
}

#[test]
fn a_new_data_key_seals_every_row_anew_and_changes_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), &material(1)).unwrap();
    for value in ["SECRET-CANARY-1", "SECRET-CANARY-2"] {
        store.put("github", &secret(value), 0).unwrap();
    }
    store.keep_token("github", "grant", &secret("TOKEN-CANARY-1"), 99).unwrap();
    let placeholder = store.placeholder_bytes("lease_a", "github");
    let sealed = |store: &Store| -> Vec<Vec<u8>> {
        let sql = "SELECT sealed FROM secret UNION ALL SELECT sealed FROM token
                   UNION ALL SELECT wrapped_key FROM vault";
        let mut statement = store.db.prepare(sql).unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    let before = sealed(&store);

    // Twice: what the first left behind is sealed anew as well.
    assert_eq!(store.rotate().unwrap(), 3);
    assert_eq!(store.rotate().unwrap(), 3);

    for reopened in [false, true] {
        if reopened {
            drop(store);
            store = Store::open(dir.path(), &material(1)).unwrap();
        }
        let values = store.values("github").unwrap();
        assert_eq!(texts(&values), [b"SECRET-CANARY-2", b"SECRET-CANARY-1"]);
        let (token, ends) = store.token("github", "grant").unwrap().unwrap();
        assert_eq!((token.expose_secret(), ends), (&b"TOKEN-CANARY-1"[..], 99));
        assert_eq!(store.placeholder_bytes("lease_a", "github"), placeholder);
        assert_eq!(store.list().unwrap()[0].version, 2);
    }
    let file = std::fs::read(dir.path().join("vault.sqlite")).unwrap();
    for old in before {
        let found = file.windows(old.len()).any(|window| window == old);
        assert!(!found, "a row under the former key is still in the file");
    }
}
