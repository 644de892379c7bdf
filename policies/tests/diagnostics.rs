//! What an operator sees for each mistake: position, message, hint.

use policies::{Diagnostic, PolicySet, Severity};

fn found_in(text: &str) -> Vec<Diagnostic> {
    let groups = "[groups]\nregistries = []\nmirror = [\"mirror.example\"]\n";
    let files = [("dev.toml", text), ("groups.toml", groups)]
        .map(|(name, text)| (name.to_owned(), text.to_owned()));
    match PolicySet::parse(&files) {
        Ok(set) => set.warnings().to_vec(),
        Err(found) => found,
    }
}

fn credential(rest: &str) -> String {
    format!(
        "[[egress.allow]]\nhosts = [\"a.example\"]\ncredential = \"c\"\n\
         [credentials.c]\nsecret = \"local:c\"\ninject = {{ bearer = true }}\n\
         hosts = [\"a.example\"]\n{rest}"
    )
}

#[test]
fn shows_file_line_column_caret_and_the_nearest_key() {
    let text = "[[egress.allow]]\nhosts = [\"a.example\"]\nmethod = [\"GET\"]\n";

    let shown = found_in(text)[0].to_string();

    assert_eq!(
        shown,
        "dev.toml:3:1: unknown key \"method\"\n 3 | method = [\"GET\"]\n   | ^^^^^^\n\
         did you mean \"methods\"?"
    );
}

/// One mistake each: the text, `line:column`, and a part of what is shown.
const MISTAKES: &[(&str, &str, &str)] = &[
    // The file.
    ("descripton = \"x\"", "1:1", "did you mean \"description\"?"),
    ("description = 1", "1:15", "is a string, not an integer"),
    ("description = \"a\"\ndescription = \"b\"", "2:1", "duplicate key"),
    ("description = ", "1:15", "not valid TOML"),
    ("sandbox = 3", "1:1", "is a table, not an integer"),
    ("[egress]\ndeny = []", "2:1", "what is not allowed is denied already"),
    ("[egress]\nallow = 1", "2:1", "is an array of tables, not an integer"),
    ("[access]", "1:2", "[access] lists nobody"),
    ("access = {}", "1:1", "write users = [\"NAME\"] or groups"),
    ("[access]\n# users = [\"alice\"]", "1:2", "[access] lists nobody"),
    ("[access]\nusers = [\"uid:x\"]", "2:10", "a number stands after \"uid:\""),
    // [sandbox]
    ("[sandbox]\nmemory = \"2\"", "2:10", "a number and a unit"),
    ("[sandbox]\nmemory = \"1KiB\"", "2:10", "is 16MiB to"),
    ("[sandbox]\ntool_timeout = \"2m\"", "2:1", "did you mean \"tool-timeout\"?"),
    ("[sandbox]\ntool-timeout = \"2 weeks\"", "2:16", "\"90s\""),
    ("[sandbox]\nidle-timeout = \"0s\"", "2:16", "is 1s to 720h"),
    ("[sandbox]\nprocesses = 0", "2:13", "is 4 to 65536"),
    ("[sandbox]\nroot = \"images/x\"", "2:8", "not a root"),
    ("[sandbox]\nlandlock-floor = 0", "2:18", "is 2 to 16"),
    ("[sandbox]\nlimits = \"off\"", "2:10", "\"required\""),
    ("[sandbox]\npackages = { pip = [\"--pre\"] }", "2:21", "not the name of a package"),
    (
        "[sandbox]\nmounts = [{ source = \"/proc\", target = \"/x\" }]",
        "2:22",
        "cannot lie in /proc",
    ),
    (
        "[sandbox]\nmounts = [{ source = \"/a\", target = \"/usr/x\" }]",
        "2:37",
        "cannot lie in /usr",
    ),
    ("[sandbox]\nmounts = [{ source = \"/a/../b\", target = \"/x\" }]", "2:22", "without \"..\""),
    ("[sandbox]\nmounts = [{ target = \"/x\" }]", "2:11", "lacks \"source\""),
    ("[sandbox.env]\n\"A-B\" = \"x\"", "2:1", "a variable's name"),
    ("[sandbox.env]\n\"A=B\" = \"x\"", "2:1", "a variable's name"),
    ("[sandbox.env]\n\"\" = \"x\"", "2:1", "a variable's name"),
    ("[sandbox.env]\nA = \"x\\u0000y\"", "2:5", "cannot hold NUL"),
    ("[sandbox.env]\nSSL_CERT_FILE = \"/x\"", "2:1", "set by sandboxd in every sandbox"),
    ("[sandbox.env]\nGIT_CONFIG_KEY_7 = \"x\"", "2:1", "set by sandboxd in every sandbox"),
    // Hosts.
    ("[[egress.allow]]\nports = [443]", "1:1", "egress.allow[0] lacks \"hosts\""),
    ("[[egress.allow]]\nhosts = []", "2:1", "allows nothing"),
    ("[[egress.allow]]\nhosts = [\"https://a.example\"]", "2:10", "a host stands alone"),
    ("[[egress.allow]]\nhosts = [\"a.example:443\"]", "2:10", "ports have a key of their own"),
    ("[[egress.allow]]\nhosts = [\"localhost\"]", "2:10", "cannot be allowed"),
    ("[[egress.allow]]\nhosts = [\"*.com\"]", "2:10", "anybody"),
    ("[[egress.allow]]\nhosts = [\"*.co.uk\"]", "2:10", "anybody"),
    ("[[egress.allow]]\nhosts = [\"a.*.example\"]", "2:10", "only in front"),
    ("[[egress.allow]]\nhosts = [\"*\"]", "2:10", "only in front"),
    ("[[egress.allow]]\nhosts = [\"@mirrors\"]", "2:10", "did you mean \"@mirror\"?"),
    ("[[egress.allow]]\nhosts = [\"@x\"]", "2:10", "groups.toml has @mirror, @registries"),
    ("[[egress.allow]]\nhosts = [\"224.0.0.1\"]", "2:10", "never dialled"),
    ("[[egress.allow]]\nhosts = [\"0\"]", "2:10", "never dialled"),
    // The rest of a rule.
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\nmethods = [\"get\"]",
        "3:12",
        "did you mean \"GET\"?",
    ),
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\nmethods = [\"TRACE\"]",
        "3:12",
        "cannot be allowed",
    ),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\nmethods = []", "3:1", "allows nothing"),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\npaths = [\"/a*\"]", "3:10", "one whole segment"),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\npaths = [\"a\"]", "3:10", "begins with a slash"),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\nports = [0]", "3:10", "1 to 65535"),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\nports = [53]", "3:10", "DNS"),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\nports = [80]", "3:10", "plaintext = true"),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\naddresses = [\"10.0.0.1/8\"]", "3:14", "bits set"),
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\naddresses = [\"0.0.0.0/0\"]",
        "3:14",
        "every address",
    ),
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\naddresses = [\"169.254.0.0/16\"]",
        "3:14",
        "name the one address",
    ),
    ("[[egress.allow]]\nhosts = [\"a.example\"]\naddresses = [\"ff02::/16\"]", "3:14", "never"),
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\ngit = { push = true }",
        "3:1",
        "lists the repositories",
    ),
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\ngit = { repositories = [\"/a\"] }",
        "3:25",
        "owner/name",
    ),
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\npaths = [\"/x\"]\n\
         git = { repositories = [\"a/b\"] }",
        "3:1",
        "says already",
    ),
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\nlfs = true\n\
         git = { repositories = [\"a/b\"] }",
        "3:1",
        "paths = [\"/owner/name.git/info/lfs/**\"]",
    ),
    // Credentials.
    (
        "[[egress.allow]]\nhosts = [\"a.example\"]\ncredential = \"c\"",
        "3:14",
        "credential \"c\" is not defined",
    ),
    (
        "[credentials.c]\ninject = { bearer = true }\nhosts = [\"a.example\"]",
        "1:14",
        "lacks \"secret\"",
    ),
    // Rules against each other.
    (
        "[[egress.allow]]\nhosts = [\"*.a.example\"]\n[[egress.allow]]\nhosts = [\"b.a.example\"]\n\
         methods = [\"GET\"]",
        "3:1",
        "never decides",
    ),
    // MCP.
    ("[mcp.x]\nurl = \"mcp.example/mcp\"", "2:7", "begins with https://"),
    ("[mcp.x]\nurl = \"https://u@mcp.example/mcp\"", "2:7", "holds a user"),
    ("[mcp.x]\nurl = \"https://mcp.example/a/../b\"", "2:7", "dot segment"),
    ("[mcp.x]\ncredential = \"c\"", "1:6", "lacks \"url\""),
];

#[test]
fn every_mistake_is_shown_where_it_stands() {
    for (text, position, part) in MISTAKES {
        let found = found_in(text);

        let errors: Vec<_> = found.iter().filter(|d| d.severity == Severity::Error).collect();
        let shown: Vec<_> =
            errors.iter().map(|d| (format!("{}:{}", d.line, d.column), d.to_string())).collect();
        assert!(
            shown.iter().any(|(at, text)| at == position && text.contains(part)),
            "expected {position} {part:?} in {text:?}, found {shown:#?}"
        );
    }
}

/// One mistake each in the credential of an otherwise good file.
const CREDENTIAL_MISTAKES: &[(&str, &str, &str)] = &[
    ("secret = \"local:c\"", "secret = \"SECRET-CANARY\"", "\"backend:path\""),
    ("secret = \"local:c\"", "secret = \"aws-secrets-manager:a b\"", "by its name or ARN"),
    ("secret = \"local:c\"", "secret = \"aws-secrets-manager:a?x=y\"", "by its name or ARN"),
    ("secret = \"local:c\"", "secret = \"aws-role:arn:aws:x\"", "[aws.roles.NAME]"),
    ("secret = \"local:c\"", "secret = \"aws-role:deploy\"", "sign requests and stand in none"),
    ("secret = \"local:c\"", "secret = \"vault:kv/c\"", "mount, path and field"),
    ("secret = \"local:c\"", "secret = \"openbao:c#f\"", "mount, path and field"),
    ("secret = \"local:c\"", "secret = \"openbao:kv/../c#f\"", "mount, path and field"),
    ("secret = \"local:c\"", "secret = \"openbao:kv/c%2f#f\"", "mount, path and field"),
    ("secret = \"local:c\"", "secret = \"openbao:kv/c@0#f\"", "mount, path and field"),
    ("secret = \"local:c\"", "secret = \"openbao:kv/c@1?x#f\"", "mount, path and field"),
    ("secret = \"local:c\"", "secret = \"openbao-lease:db#f\"", "its path, parameters"),
    ("secret = \"local:c\"", "secret = \"openbao-lease:db/creds/../x#f\"", "its path, parameters"),
    ("secret = \"local:c\"", "secret = \"openbao-lease:db/creds/x?a#f\"", "its path, parameters"),
    ("secret = \"local:c\"", "secret = \"openbao-lease:db/creds/x#f:\"", "its path, parameters"),
    ("secret = \"local:c\"", "secret = \"x:SECRET-CANARY\"", "unknown backend"),
    ("secret = \"local:c\"", "secret = \"file:run/c\"", "absolute path"),
    ("secret = \"local:c\"", "secret = \"file:/run/../c\"", "absolute path"),
    (
        "secret = \"local:c\"\ninject = { bearer = true }",
        "secret = \"file:/c\"\ninject = { oauth2 = { grant = \"refresh-token\", \
         token-url = \"https://l.example/t\", client-id = \"c\" } }",
        "embedded vault only",
    ),
    ("secret = \"local:c\"", "secret = \"exec:op read\"", "a command is named"),
    ("secret = \"local:c\"", "secret = \"local:a b\"", "a secret's name"),
    ("{ bearer = true }", "{ client-certificate = false }", "true or absent"),
    (
        "{ bearer = true }",
        "{ client-certificate = true, bearer = true }",
        "exactly one of bearer, basic, registry, header, query, placeholder, aws-sigv4, \
         client-certificate\n",
    ),
    (
        "{ bearer = true }",
        "{ client-certificate = true, oauth2 = { grant = \"client-credentials\", \
         token-url = \"https://t.example/\", client-id = \"c\" } }",
        "a token is no certificate",
    ),
    (
        "inject = { bearer = true }",
        "inject = { client-certificate = true }\nenv = \"T\"",
        "nothing of a certificate stands in a request: \"env\"",
    ),
    (
        "inject = { bearer = true }",
        "inject = { client-certificate = true }\nwhen = \"absent\"",
        "nothing of a certificate stands in a request: \"when\"",
    ),
    (
        "inject = { bearer = true }",
        "inject = { client-certificate = true }\nallow-plaintext = true",
        "over TLS only",
    ),
    ("credential = \"c\"", "credential = [\"c\", \"c\"]", "one credential is put into"),
    ("credential = \"c\"", "credential = [\"c\", \"d\"]", "credential \"d\" is not defined"),
    (
        "end",
        "[credentials.d]\nsecret = \"local:c\"\ninject = { client-certificate = true }\n\
         hosts = [\"a.example\"]\nend",
        "\"c\" would put the key of certificate \"d\" into requests",
    ),
    ("{ bearer = true }", "{ query = \"a&b\" }", "a parameter's name"),
    ("{ bearer = true }", "{ oauth2 = {} }", "lacks \"token-url\""),
    (
        "{ bearer = true }",
        "{ oauth2 = { grant = \"x\", token-url = \"https://t.example/\" } }",
        "unknown grant",
    ),
    (
        "{ bearer = true }",
        "{ oauth2 = { grant = \"refresh-token\", token-url = \"http://t.example/\", \
         client-id = \"c\" } }",
        "over https only",
    ),
    (
        "{ bearer = true }",
        "{ oauth2 = { grant = \"refresh-token\", token-url = \"https://t.example/\" } }",
        "lacks \"client-id\"",
    ),
    (
        "{ bearer = true }",
        "{ oauth2 = { grant = \"refresh-token\", token-url = \"https://t.example/\", \
         client-id = \"c\", client-secret = \"SECRET-CANARY\" } }",
        "a client's secret is named",
    ),
    (
        "{ bearer = true }",
        "{ oauth2 = { grant = \"client-credentials\", token-url = \"https://t.example/\", \
         client-id = \"c\", client-auth = \"none\" } }",
        "the client shows its secret",
    ),
    (
        "{ bearer = true }",
        "{ oauth2 = { grant = \"jwt-bearer\", token-url = \"https://t.example/\", issuer = \"i\", \
         client-secret = \"local:s\" } }",
        "\"client-secret\" without \"client-id\"",
    ),
    ("{ bearer = true }", "{ github-app = { app = \"1\" } }", "lacks \"installation\""),
    ("{ bearer = true }", "{ aws-sigv4 = { regions = [\"eu-west-1\"] } }", "lacks \"services\""),
    (
        "{ bearer = true }",
        "{ aws-sigv4 = { regions = [\"eu-west-1\"], services = [\"s3\"] } }",
        "signed again",
    ),
    ("end", "when = \"sometimes\"\nend", "unknown \"when\""),
    ("end", "when = \"placeholder\"\nend", "never sees a placeholder"),
    ("end", "shape = \"xyz_\"\nend", "unknown shape"),
    ("end", "env = [\"A\", \"B C\"]\nend", "a variable's name"),
    ("{ bearer = true }", "{ bearer = false }", "true or absent"),
    ("{ bearer = true }", "{ beare = true }", "did you mean \"bearer\"?"),
    ("{ bearer = true }", "\"bearer\"", "is a table, not a string"),
    ("{ bearer = true }", "{}", "exactly one of"),
    ("{ bearer = true }", "{ basic = \"a:b\" }", "no colon"),
    ("{ bearer = true }", "{ basic = false }", "true or absent"),
    ("{ bearer = true }", "{ basic = true }", "no user and password of one lease"),
    ("{ bearer = true }", "{ header = \"Host\" }", "frames the message"),
    ("{ bearer = true }", "{ header = \"a b\" }", "not the name of a header"),
    ("{ bearer = true }", "{ header = { name = \"a\", template = \"x\" } }", "one \"{}\""),
    ("{ bearer = true }", "{ placeholder = [\"cookie\"] }", "unknown place"),
    ("{ bearer = true }", "{ placeholder = [\"header\"] }", "env = \"TOKEN\""),
    (
        "hosts = [\"a.example\"]\ncred",
        "hosts = [\"a.example\", \"b.example\"]\ncred",
        "may not go to b.example",
    ),
    (
        "hosts = [\"a.example\"]\ncred",
        "hosts = [\"*.a.example\"]\ncred",
        "may not go to *.a.example",
    ),
    ("credential = \"c\"", "credential = \"d\"", "credential \"d\" is not defined"),
    ("credential = \"c\"", "credential = \"c\"\nplaintext = true", "may not go over plain http"),
    ("hosts = [\"a.example\"]\nend", "hosts = [\"*.a.example\"]\nend", "not a.example itself"),
    ("end", "token = \"SECRET-CANARY\"\nend", "unknown key \"token\""),
    ("end", "env = \"A B\"\nend", "a variable's name"),
    ("end", "env = \"T\"\n[sandbox.env]\nT = \"x\"", "is set in [sandbox.env] too"),
    ("end", "env = \"PATH\"", "PATH is no variable for a placeholder"),
    ("end", "env = [\"T\", \"LD_PRELOAD\"]", "LD_PRELOAD is no variable for a placeholder"),
    ("end", "env = \"https_proxy\"", "https_proxy is no variable for a placeholder"),
    ("end", "env = \"CURL_CA_BUNDLE\"", "set by sandboxd in every sandbox"),
];

#[test]
fn mistakes_in_credentials_are_shown_without_what_may_be_a_value() {
    for (good, bad, part) in CREDENTIAL_MISTAKES {
        let text = credential("end").replacen(good, bad, 1).replace("end", "");
        let found = found_in(&text);

        let shown: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert!(shown.iter().any(|text| text.contains(part)), "{part:?} in {text}\n{shown:#?}");
        assert!(!shown.iter().any(|text| text.contains("CANARY")), "{shown:#?}");
    }
    assert_eq!(found_in(&credential("")), []);
}

#[test]
fn one_slip_is_one_finding() {
    for (good, bad) in [
        ("hosts = [\"a.example\"]\ncred", "host = [\"a.example\"]\ncred"),
        ("secret = ", "secrt = "),
        ("inject = ", "injekt = "),
        ("credential = \"c\"", "credential = \"cc\""),
    ] {
        let found = found_in(&credential("").replacen(good, bad, 1));

        assert_eq!(found.len(), 1, "{bad}: {found:#?}");
    }
}

#[test]
fn all_mistakes_of_all_files_are_found_at_once() {
    let files = [
        ("b.toml", "x = 1\n[sandbox]\ny = 2\n"),
        ("a.toml", "[[egress.allow]]\nhosts = [\"localhost\"]\nmethods = [\"get\"]\n"),
        ("Bad Name.toml", ""),
        ("groups.toml", "[groups]\ng = [\"@h\"]\n"),
    ]
    .map(|(name, text)| (name.to_owned(), text.to_owned()));

    let found = PolicySet::parse(&files).unwrap_err();

    let at: Vec<_> = found.iter().map(|d| format!("{}:{}", d.file, d.line)).collect();
    assert_eq!(
        at,
        ["groups.toml:2", "b.toml:1", "b.toml:3", "a.toml:2", "a.toml:3", "Bad Name.toml:0"]
    );
}

#[test]
fn naming_a_metadata_address_is_a_warning_and_the_file_stands() {
    for rule in
        ["hosts = [\"0xa9fea9fe\"]", "hosts = [\"a.example\"]\naddresses = [\"169.254.169.254\"]"]
    {
        let found = found_in(&format!("[[egress.allow]]\n{rule}\n"));

        let [warning] = &found[..] else { panic!("{rule}: {found:?}") };
        assert_eq!(warning.severity, Severity::Warning);
        assert!(warning.to_string().contains("metadata"), "{warning}");
    }
}

#[test]
fn an_unused_credential_is_a_warning_and_the_file_stands() {
    let text = credential("").replace("credential = \"c\"\n", "");

    let found = found_in(&text);

    assert_eq!(found.len(), 1);
    assert_eq!(found[0].severity, Severity::Warning);
    assert!(found[0].to_string().contains("warning: credential \"c\" is used by no rule"));
}

#[test]
fn hostile_files_end_in_diagnostics_and_not_in_a_panic() {
    let deep = "a = ".to_owned() + &"[".repeat(10_000);
    let many = "x1 = 1\n".repeat(10_000);
    let wide: String = (0..10_000).map(|i| format!("k{i} = 1\n")).collect();
    let dotted = "a.".repeat(5_000) + "b = 1";
    for text in [&deep, &many, &wide, &dotted, "\u{0}", "\u{feff}x", "[[egress.allow]]\nhosts=[[]]"]
    {
        let found = found_in(text);
        assert!(!found.is_empty() && found.len() <= 100, "{text:.40}");
    }
}
