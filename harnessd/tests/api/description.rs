//! The checked-in OpenAPI description and the routes are the same.

use serde_json::{Value, json};

use super::daemon::Daemon;

const ROUTES: &str = include_str!("../../src/api/mod.rs");
const METHODS: [&str; 3] = ["get", "post", "delete"];

fn description() -> Value {
    serde_json::from_str(include_str!("../../openapi.json")).unwrap()
}

#[test]
fn every_route_is_described_and_nothing_else() {
    let text = ROUTES.split_once("Router::new()").unwrap().1;
    let quoted = text.split('"').skip(1).step_by(2);
    let mut routes: Vec<&str> = quoted.filter(|text| text.starts_with('/')).collect();
    routes.sort_unstable();
    let description = description();
    let mut described: Vec<&String> =
        description["paths"].as_object().unwrap().iter().map(|(path, _)| path).collect();
    described.sort_unstable();

    assert_eq!(routes, described);
}

#[tokio::test]
async fn every_described_method_is_served_and_no_other() {
    let daemon = Daemon::start(json!([])).await;
    let description = description();
    for (path, operations) in description["paths"].as_object().unwrap() {
        let concrete: Vec<&str> =
            path.split('/').map(|part| if part.starts_with('{') { "none" } else { part }).collect();
        for method in METHODS {
            let status =
                daemon.call(&method.to_uppercase(), &concrete.join("/"), None).await.status;

            let described = operations.get(method).is_some();
            assert_eq!(status != 405, described, "{method} {path}: {status}");
        }
    }
}
