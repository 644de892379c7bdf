//! The events of a session, as they are stored.
//!
//! A format of its own: a new variant or an optional field may come, nothing is ever renamed or
//! reinterpreted. The wire API converts from it at its edge. Content blocks are kept whole, as the
//! Messages API knows them, because the model must get its own words back unchanged.

use ipc::id::{CallId, SandboxId, WorkspaceId};
use ipc::sandbox::Layer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One event of a session, read back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// From 1, without gaps.
    pub seq: u64,
    /// `sevt_…`, unique; what other events and the wire API refer to.
    pub id: String,
    /// RFC 3339 in UTC, milliseconds: when it was appended.
    pub time: String,
    pub body: Body,
}

/// An event that is not yet in the log. Its id is drawn here, so that previews can name it before.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    pub id: String,
    pub body: Body,
}

impl NewEvent {
    pub fn new(body: Body) -> Self {
        Self { id: new_event_id(), body }
    }
}

impl From<Body> for NewEvent {
    fn from(body: Body) -> Self {
        Self::new(body)
    }
}

/// Draws the id of a new event: 45 bits of time, then 75 of chance. Ids of one moment lie side by
/// side in the index of ids, so that events of many sessions do not write a page each.
pub fn new_event_id() -> String {
    // In the order of its characters, unlike the usual alphabet of base 32.
    const ORDERED: &[u8; 32] = b"234567abcdefghijklmnopqrstuvwxyz";
    let millis = jiff::Timestamp::now().as_millisecond().unsigned_abs();
    let mut id = String::from("sevt_");
    for place in (0..9).rev() {
        let digit = (millis >> (place * 5)) & 31;
        id.push(char::from(ORDERED[usize::try_from(digit).unwrap_or(0)]));
    }
    id + &ipc::id::random_text(15)
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Body {
    /// The first event of every session: all that the loop needs to know to run it.
    SessionCreated(Created),
    /// Agent, title, metadata or budget changed; the agent holds from the next turn.
    SessionUpdated {
        agent: Option<Agent>,
        title: Option<Value>,
        metadata: Option<Value>,
        /// Set: the new budget in cents, or none any more.
        #[serde(default, skip_serializing_if = "Option::is_none", with = "twice")]
        budget_cents: Option<Option<u64>>,
    },
    /// From the next request on the model is shown the session through this context profile.
    ProfileChanged { profile: String },

    /// The client says something. It waits until a [`Body::Processed`] names it.
    UserMessage { content: Vec<Value> },
    /// The client stops the turn. It waits until a [`Body::Processed`] names it.
    UserInterrupt {},
    /// The client decides about a tool call with permission `ask`. Needs a [`Body::Processed`].
    UserToolConfirmation {
        /// Id of the [`Body::ToolUse`] event.
        tool_use: String,
        allow: bool,
        deny_message: Option<String>,
    },
    /// The client ran one of its own tools. Processed on receipt: it needs no `Processed`.
    UserCustomToolResult {
        /// Id of the [`Body::ToolUse`] event.
        tool_use: String,
        content: Vec<Value>,
        is_error: bool,
    },
    /// The loop has taken these client events in; this event's time is their processing time.
    Processed { events: Vec<String> },

    /// A turn begins, or goes on after a wait.
    StatusRunning {},
    /// A turn ends or waits for the client.
    StatusIdle {
        stop_reason: StopReason,
        /// What the model said about a refusal.
        stop_details: Option<Value>,
    },
    /// A transient failure: the loop tries again by itself.
    StatusRescheduled {},
    /// Nothing will ever happen in this session again.
    StatusTerminated {},

    /// The model is about to be asked.
    ModelRequestStarted {
        /// The name the agent gave.
        model: String,
        /// Name and version of the context profile that chose the messages.
        profile: String,
        /// The event that its context begins with; none: the first.
        #[serde(default, skip_serializing_if = "is_zero")]
        from: u64,
        /// It asks for a summary of what the context leaves out, not for an answer.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        summary: bool,
    },
    /// The request ended; what it brought stands directly before this event, in one append.
    ModelRequestEnded(RequestEnded),
    /// What a model wrote about earlier events, for contexts that leave those out.
    Summary(Summary),
    /// Text blocks of an answer.
    AgentMessage { request: String, content: Vec<Value> },
    /// Thinking, and other blocks that only the model itself reads; sent back unchanged.
    AgentThinking { request: String, blocks: Vec<Value> },
    /// The model wants a tool to run.
    ToolUse(ToolUse),
    /// The call is about to be sent to a sandbox; from now on it may have happened.
    ToolStarted {
        call: CallId,
        /// Identity of the journal it was sent to: only that one can say what became of it.
        journal: String,
        /// Fencing number of the process that sent it.
        fence: u64,
    },
    /// What became of a call. Every [`Body::ToolUse`] gets exactly one, or a custom tool result.
    ToolResult(ToolResult),

    /// Tokens used by the whole session so far; directly before every idle.
    Usage { usage: Usage },
    /// Something failed; whether that ends the turn stands in `retry`.
    Error {
        error: ErrorKind,
        message: String,
        retry: Retry,
        /// The MCP server that failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mcp_server: Option<String>,
    },
    /// The MCP servers were asked what tools they have; none: the same as before.
    McpListed { tools: Option<Vec<Tool>> },
    /// For whoever reads the log: nothing follows from it.
    Note(Note),
}

/// How a session was set up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Created {
    /// The principal that made it: `uid:1000`.
    pub owner: String,
    /// Name of the policy file that rules it, without `.toml`.
    pub policy: String,
    /// A directory of the client's; none: the session's own workspace.
    pub workspace: Option<WorkspaceId>,
    pub agent: Agent,
    /// What its model requests may cost, in US cents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_cents: Option<u64>,
}

/// What of an agent the loop needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Agent {
    /// Name of the model, as the configuration's table knows it.
    pub model: String,
    pub system: Option<String>,
    pub tools: Vec<Tool>,
    /// MCP servers whose tools it may use; what those are is found when a turn begins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mcp: Vec<McpServer>,
    /// The agent as the wire API shows it in this session.
    pub snapshot: Value,
}

/// A tool the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Tool {
    /// One of sandboxd's: `bash`, `read`, `write`, `edit`, `glob`, `grep`.
    Sandbox { name: String, permission: Permission },
    /// The client runs it.
    Custom { name: String, description: String, input_schema: Value },
    /// A tool of an MCP server, which calls it `tool`.
    Mcp {
        name: String,
        description: String,
        input_schema: Value,
        permission: Permission,
        target: McpTarget,
    },
}

impl Tool {
    pub fn name(&self) -> &str {
        match self {
            Self::Sandbox { name, .. } | Self::Custom { name, .. } | Self::Mcp { name, .. } => name,
        }
    }
}

/// An MCP server of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpServer {
    pub name: String,
    pub url: String,
    /// What holds for tools that `configs` does not name.
    pub default: McpSetting,
    /// By the server's own name of the tool.
    pub configs: Vec<(String, McpSetting)>,
}

/// What holds for a tool of an MCP server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpSetting {
    pub enabled: bool,
    pub permission: Permission,
}

/// A tool of an MCP server, under the server's own name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpTarget {
    pub server: String,
    pub tool: String,
}

/// What must happen before a tool call runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Permission {
    Allow,
    /// The client is asked.
    Ask,
    /// The loop answers with an error at once: unknown or disabled tool, unusable input.
    Deny,
}

/// Why a session is idle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StopReason {
    /// Finished, or interrupted.
    EndTurn,
    /// The client must answer these [`Body::ToolUse`] events.
    RequiresAction { events: Vec<String> },
    /// The model could not be reached, or its answer could not be used.
    RetriesExhausted,
    /// The model refused.
    Refusal,
    /// The budget is spent; a greater one lets the turn go on.
    BudgetReached,
}

/// The end of one request to a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestEnded {
    /// Id of the [`Body::ModelRequestStarted`] event.
    pub request: String,
    /// Set when it brought no answer.
    pub failure: Option<Failure>,
    /// The model that answered, as it names itself.
    pub model: Option<String>,
    /// The provider's id of the answer.
    pub message: Option<String>,
    /// As the provider says it: `end_turn`, `tool_use`, `max_tokens`, `refusal`, …
    pub stop_reason: Option<String>,
    pub stop_details: Option<Value>,
    /// A tool call was cut off by the output limit and left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
    pub usage: Usage,
    /// At list price, in billionths of a US dollar; none: the model has no price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_nano_usd: Option<u64>,
    /// From the request to the first piece of the answer.
    pub first_token_ms: Option<u64>,
    pub duration_ms: u64,
}

/// Why a model request brought no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub error: ErrorKind,
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// How long the provider asked to wait.
    pub retry_after_ms: Option<u64>,
    /// The context is longer than the model can take: a shorter one may succeed at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overflow: bool,
}

impl Failure {
    pub fn new(error: ErrorKind, message: impl Into<String>, retryable: bool) -> Self {
        let message = message.into();
        Self { error, message, retryable, retry_after_ms: None, overflow: false }
    }
}

impl RequestEnded {
    /// The end of a request of which nothing more is known.
    pub fn new(request: impl Into<String>) -> Self {
        Self {
            request: request.into(),
            failure: None,
            model: None,
            message: None,
            stop_reason: None,
            stop_details: None,
            cut: false,
            usage: Usage::default(),
            cost_nano_usd: None,
            first_token_ms: None,
            duration_ms: 0,
        }
    }
}

/// What stands for earlier events in a context that leaves them out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Id of the [`Body::ModelRequestStarted`] event.
    pub request: String,
    /// Name and version of the profile that asked for it.
    pub profile: String,
    /// The events before this one are summed up.
    pub upto: u64,
    pub text: String,
}

/// Tokens of one request, or of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub cache_creation_input_tokens: u64,
    pub cache_read_input_tokens: u64,
}

impl Usage {
    /// All tokens of a request and its answer: what the context held.
    pub fn total(&self) -> u64 {
        self.input_tokens
            .saturating_add(self.output_tokens)
            .saturating_add(self.cache_creation_input_tokens)
            .saturating_add(self.cache_read_input_tokens)
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.input_tokens = self.input_tokens.saturating_add(other.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.cache_creation_input_tokens =
            self.cache_creation_input_tokens.saturating_add(other.cache_creation_input_tokens);
        self.cache_read_input_tokens =
            self.cache_read_input_tokens.saturating_add(other.cache_read_input_tokens);
    }
}

/// A tool call, as the model asked for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolUse {
    /// Id of the [`Body::ModelRequestStarted`] event.
    pub request: String,
    /// The one id of this call, from here to the audit.
    pub call: CallId,
    /// The model's own id; it must come back with the result.
    pub model_id: String,
    pub name: String,
    pub input: Value,
    pub hand: HandKind,
    pub permission: Permission,
    /// Why `permission` is `deny`, for the model.
    pub reason: Option<String>,
    /// Set when an MCP server runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<McpTarget>,
}

/// Who runs a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HandKind {
    /// sandboxd.
    Sandbox,
    /// The client of the API.
    Client,
    /// An MCP server.
    Mcp,
}

/// What the model is told about a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    /// Id of the [`Body::ToolUse`] event.
    pub tool_use: String,
    pub call: CallId,
    pub content: Vec<Value>,
    pub is_error: bool,
    pub outcome: CallOutcome,
    /// Facts of sandboxd's receipt; none when no sandbox was asked.
    pub receipt: Option<ReceiptFacts>,
    /// The call was one of an MCP server's tool.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mcp: bool,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    Finished,
    TimedOut,
    OutOfMemory,
    Cancelled,
    /// It began, and nobody can say whether it did its work.
    OutcomeUnknown,
    /// It never began.
    Refused,
    /// The client said no, or the tool may not be used.
    Denied,
}

/// What of a receipt is kept in the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptFacts {
    pub sandbox: Option<SandboxId>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub output_bytes: u64,
    pub spill: Option<String>,
    pub started_at: String,
    pub duration_ms: u64,
    pub provision_us: Option<u64>,
    pub layers: Vec<Layer>,
    pub journal: String,
    /// Secret values that were masked in the content before it was stored.
    pub masked: u64,
}

/// The kinds of error a session shows; the wire API appends `_error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    Unknown,
    ModelOverloaded,
    ModelRateLimited,
    ModelRequestFailed,
    Billing,
    McpConnectionFailed,
    McpAuthenticationFailed,
}

/// What follows from an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// The loop tries again by itself.
    Retrying,
    /// The turn is dead; the session is not.
    Exhausted,
    /// The session is dead.
    Terminal,
}

/// A remark for whoever reads the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "note", rename_all = "snake_case")]
pub enum Note {
    /// Another process took the session up in the middle of a turn.
    Recovered { fence: u64, pid: u32 },
    /// The session came from a file that held these many events of it.
    Imported { events: u64, head: String },
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A field that may be absent, null or a value: absent and null are not the same.
mod twice {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
    pub fn serialize<S: Serializer>(
        value: &Option<Option<u64>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.flatten().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Option<u64>>, D::Error> {
        Option::<u64>::deserialize(deserializer).map(Some)
    }
}

impl Body {
    /// Splits the body into the two columns of the log: its kind and the rest as JSON.
    pub fn to_columns(&self) -> Result<(String, String), serde_json::Error> {
        let mut value = serde_json::to_value(self)?;
        let kind = value
            .as_object_mut()
            .and_then(|fields| fields.shift_remove("kind"))
            .and_then(|kind| kind.as_str().map(str::to_owned))
            .expect("an internally tagged enum of structs is an object with its tag");
        Ok((kind, value.to_string()))
    }

    /// Joins the two columns of the log.
    pub fn from_columns(kind: &str, body: &str) -> Result<Self, serde_json::Error> {
        let mut value: Value = serde_json::from_str(body)?;
        if let Some(fields) = value.as_object_mut() {
            fields.insert("kind".to_owned(), Value::String(kind.to_owned()));
        }
        serde_json::from_value(value)
    }

    /// Whether the body comes from the client and waits for a [`Body::Processed`].
    pub fn needs_processing(&self) -> bool {
        matches!(
            self,
            Self::UserMessage { .. } | Self::UserInterrupt {} | Self::UserToolConfirmation { .. }
        )
    }

    /// Whether the loop has something to do once this event is in the log.
    pub fn calls_for_the_loop(&self) -> bool {
        self.needs_processing()
            || matches!(self, Self::UserCustomToolResult { .. })
            || matches!(self.status(), Some(Status::Running | Status::Rescheduling))
    }

    /// The session's status after this event, where it changes it.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::StatusRunning {} => Some(Status::Running),
            Self::StatusIdle { .. } => Some(Status::Idle),
            Self::StatusRescheduled {} => Some(Status::Rescheduling),
            Self::StatusTerminated {} => Some(Status::Terminated),
            _ => None,
        }
    }
}

/// The status of a session; one without events rests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    #[default]
    Idle,
    Running,
    Rescheduling,
    Terminated,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Rescheduling => "rescheduling",
            Self::Terminated => "terminated",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        [Self::Idle, Self::Running, Self::Rescheduling, Self::Terminated]
            .into_iter()
            .find(|s| s.as_str() == text)
    }
}

#[cfg(test)]
#[path = "event_tests.rs"]
mod tests;
