//! What clients see: the Managed Agents wire API, Tier A with files, and the operator's own routes.
//!
//! Read [`edge`] first: every request passes it, learns there whose it is, and gets its id. Then
//! one file per resource: [`agents`], [`environments`], [`sessions`], [`send`], [`events`],
//! [`stream`], [`files`], [`resources`]. What a request means is read by [`fields`], [`agent`],
//! [`tools`] and [`wire_blocks`], which name the field of every error; what goes out is written by
//! [`wire`].
//! Nothing here decides what a session does next: it appends to the log and the engine does.

mod agent;
mod agents;
mod attempt;
mod body;
mod budget;
mod cursor;
mod edge;
mod environment;
mod environments;
mod error;
mod events;
mod fields;
mod files;
mod history;
mod keys;
mod loopback;
mod mcp;
mod operator;
mod page;
mod policy_files;
mod profiles;
mod query;
mod resource;
mod resources;
mod send;
mod session;
mod sessions;
mod stream;
mod tools;
mod transfer;
mod wire;
mod wire_blocks;
mod wire_bodies;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};

use crate::engine::Engine;

pub use error::ApiError;
pub use loopback::serve_loopback;

/// What the API needs besides the engine.
#[derive(Clone, Debug)]
pub struct ApiConfig {
    /// Holds the policy files that environments are bound to.
    pub policies_dir: PathBuf,
    /// The policy of environments that name none.
    pub default_environment: String,
    /// The operator's keys of the loopback port; else the daemon keeps some in its state.
    pub keys_file: Option<PathBuf>,
    /// The daemon's own directory.
    pub state_dir: PathBuf,
    /// Takes what sessions are given to read.
    pub sandboxd: ipc::http::Client,
    /// The configuration's file and its digest.
    pub in_force: ipc::in_force::InForce,
}

/// Shared by all requests. Cheap to clone.
#[derive(Clone)]
pub struct ApiState {
    engine: Engine,
    config: Arc<ApiConfig>,
    keys: Arc<keys::Keys>,
    policies: Arc<policy_files::PolicyFiles>,
    /// Held while an answer to a tool call is checked and appended, so that of two equal ones sent
    /// at once only the first is stored.
    answers: Arc<tokio::sync::Mutex<()>>,
    /// Held by whoever makes a change again because another one came between.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Room for the bodies of requests.
    bodies: Arc<body::Bodies>,
    /// Held while what a session was given is changed, at sandboxd and in its document.
    gifts: Arc<tokio::sync::Mutex<()>>,
    /// How many more files may be on their way here.
    uploads: Arc<tokio::sync::Semaphore>,
    /// How many more event streams may be opened.
    streams: Arc<tokio::sync::Semaphore>,
    /// Held by the one replay that is under way.
    replays: Arc<tokio::sync::Mutex<()>>,
}

impl ApiState {
    pub fn new(engine: Engine, config: ApiConfig) -> Self {
        let keys = match &config.keys_file {
            Some(path) => keys::Keys::of_operator(path.clone()),
            None => keys::Keys::own(&config.state_dir),
        };
        let policies = Arc::new(policy_files::PolicyFiles::new(config.policies_dir.clone()));
        let (config, keys) = (Arc::new(config), Arc::new(keys));
        let streams = Arc::new(tokio::sync::Semaphore::new(stream::STREAMS_MAX));
        let uploads = Arc::new(tokio::sync::Semaphore::new(files::UPLOADS_MAX));
        let (answers, replays, turn) = (Arc::default(), Arc::default(), Arc::default());
        let gifts = Arc::default();
        let bodies = Arc::default();
        Self {
            engine,
            config,
            keys,
            policies,
            answers,
            turn,
            bodies,
            gifts,
            uploads,
            streams,
            replays,
        }
    }
}

/// All routes, for the Unix socket and for the loopback port alike.
pub fn router(state: ApiState) -> Router {
    Router::new()
        .route("/v1/agents", post(agents::create).get(agents::list))
        .route("/v1/agents/{agent}", get(agents::retrieve).post(agents::update))
        .route("/v1/agents/{agent}/archive", post(agents::archive))
        .route("/v1/agents/{agent}/versions", get(agents::versions))
        .route("/v1/environments", post(environments::create).get(environments::list))
        .route(
            "/v1/environments/{environment}",
            get(environments::retrieve).post(environments::update).delete(environments::delete),
        )
        .route("/v1/environments/{environment}/archive", post(environments::archive))
        .route("/v1/sessions", post(sessions::create).get(sessions::list))
        .route(
            "/v1/sessions/{session}",
            get(sessions::retrieve).post(sessions::update).delete(sessions::delete),
        )
        .route("/v1/sessions/{session}/archive", post(sessions::archive))
        .route("/v1/sessions/{session}/events", post(send::send).get(events::list))
        .route("/v1/sessions/{session}/events/stream", get(stream::stream))
        .route("/v1/sessions/{session}/resources", post(resources::add).get(resources::list))
        .route(
            "/v1/sessions/{session}/resources/{resource}",
            get(resources::retrieve).post(resources::update).delete(resources::remove),
        )
        .route("/v1/files", post(files::upload).get(files::list).layer(DefaultBodyLimit::disable()))
        .route("/v1/files/{file}", get(files::retrieve).delete(files::delete))
        .route("/v1/files/{file}/content", get(files::content))
        .route("/cleanhands/v1/health", get(operator::health))
        .route("/cleanhands/v1/sessions/{session}/log", get(operator::log))
        .route("/cleanhands/v1/sessions/{session}/verify", get(operator::verify))
        .route("/cleanhands/v1/sessions/{session}/export", get(transfer::export))
        .route("/cleanhands/v1/sessions/{session}/import", post(transfer::import))
        .route("/cleanhands/v1/sessions/{session}/profile", post(profiles::choose))
        .route("/cleanhands/v1/sessions/{session}/replay", get(profiles::compare))
        .route("/cleanhands/v1/backup", get(transfer::backup))
        .route("/cleanhands/v1/keys", post(operator::add_key).get(operator::list_keys))
        .route("/cleanhands/v1/keys/{name}", axum::routing::delete(operator::remove_key))
        .fallback(edge::no_endpoint)
        .method_not_allowed_fallback(edge::no_method)
        .layer(axum::middleware::from_fn_with_state(state.clone(), edge::pass))
        .with_state(state)
}
