CREATE TABLE chains (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        session TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        events INTEGER NOT NULL,
        head TEXT NOT NULL,
        fence INTEGER NOT NULL,
        unsettled INTEGER NOT NULL,
        created_at TEXT NOT NULL,
        updated_at TEXT NOT NULL
    ) STRICT;
INSERT INTO "chains" VALUES(1,'sesn_r6b5rslpckkhqch2pc4v7flg','uid:0','idle',23,'4fb9f607cc6e92890d92d5e25e0413e612ba5a1c4e45c19b64b97805ec0f791e',2,0,'2026-11-29T18:54:48.107Z','2026-11-29T18:54:48.255Z');
CREATE TABLE events (
        session TEXT NOT NULL,
        seq INTEGER NOT NULL,
        id TEXT NOT NULL UNIQUE,
        time TEXT NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        previous TEXT NOT NULL,
        hash TEXT NOT NULL,
        UNIQUE (session, seq)
    ) STRICT;
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',1,'sevt_ovtna6owi67c72vbn7urmzfn','2026-11-29T18:54:48.107Z','session_created','{"owner":"uid:0","policy":"dev","workspace":null,"agent":{"model":"any-model","system":null,"tools":[{"type":"sandbox","name":"bash","permission":"allow"},{"type":"sandbox","name":"edit","permission":"allow"},{"type":"sandbox","name":"read","permission":"allow"},{"type":"sandbox","name":"write","permission":"allow"},{"type":"sandbox","name":"glob","permission":"allow"},{"type":"sandbox","name":"grep","permission":"allow"}],"snapshot":{"id":"agent_6p4l2qguit6t3nwx2o5re6o7","type":"agent","version":1,"name":"tester","description":null,"model":{"id":"any-model","effort":{"type":"high"}},"system":null,"tools":[{"type":"agent_toolset_20260401","default_config":{"enabled":true,"permission_policy":{"type":"always_allow"}},"configs":[{"name":"bash","type":"bash","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"edit","type":"edit","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"read","type":"read","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"write","type":"write","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"glob","type":"glob","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"grep","type":"grep","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"web_fetch","type":"web_fetch","enabled":false,"permission_policy":{"type":"always_allow"}},{"name":"web_search","type":"web_search","enabled":false,"permission_policy":{"type":"always_allow"}}]}],"mcp_servers":[],"skills":[],"multiagent":null,"execution_identity":{"type":"service_account"}}}}','0000000000000000000000000000000000000000000000000000000000000000','f131609d32be08891beca54aec5d658343c2f2b11048721b6c8eefcd3bfbd28b');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',2,'sevt_psvj6n7chykl5rdkvpmokjau','2026-11-29T18:54:48.115Z','user_message','{"content":[{"type":"text","text":"go"}]}','f131609d32be08891beca54aec5d658343c2f2b11048721b6c8eefcd3bfbd28b','442a5a372269b87336df6aa48252a3b808d8bb1226250d53a710c4445ca138a1');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',3,'sevt_ffq7wj6ynz5vlksc7undxyo7','2026-11-29T18:54:48.134Z','status_running','{}','442a5a372269b87336df6aa48252a3b808d8bb1226250d53a710c4445ca138a1','1e8339d787378ef6a61ecce76138b850af345f950a1e971533512649a63cf26b');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',4,'sevt_gj3a6rjrbobnp4sixmgfpqw4','2026-11-29T18:54:48.134Z','processed','{"events":["sevt_psvj6n7chykl5rdkvpmokjau"]}','1e8339d787378ef6a61ecce76138b850af345f950a1e971533512649a63cf26b','6b9a5dffecb12b86d18c2e21bbc1fd8c7beeccdd860990c01dff9804e40f9ab2');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',5,'sevt_ebb34qwcz6okp7o6phup7iad','2026-11-29T18:54:48.143Z','model_request_started','{"model":"any-model","profile":"whole-log/1"}','6b9a5dffecb12b86d18c2e21bbc1fd8c7beeccdd860990c01dff9804e40f9ab2','8835d18d9017a1c6559b541051db72f047c5d19c4623d393310eb66a3c18390c');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',6,'sevt_w4gxormnopmj6zvcfxi2a4pj','2026-11-29T18:54:48.153Z','agent_message','{"request":"sevt_ebb34qwcz6okp7o6phup7iad","content":[{"type":"text","text":"One."}]}','8835d18d9017a1c6559b541051db72f047c5d19c4623d393310eb66a3c18390c','c61166fb869d821e8b51eeab4589f0325a14184507ba8160b36814f10efc5677');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',7,'sevt_6rhqk7utjxagr3zxadsqo27n','2026-11-29T18:54:48.153Z','tool_use','{"request":"sevt_ebb34qwcz6okp7o6phup7iad","call":"call_bevfzb5ynefymy44g5z3y3bz","model_id":"toolu_script_0_0","name":"bash","input":{"command":"one"},"hand":"sandbox","permission":"allow","reason":null}','c61166fb869d821e8b51eeab4589f0325a14184507ba8160b36814f10efc5677','f6e62c4f7e1db7d493facfca38f618bd55f7b71c035ef989d835b59e951257fa');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',8,'sevt_awqyvmcrrnye7ls7gejnvdiv','2026-11-29T18:54:48.153Z','model_request_ended','{"request":"sevt_ebb34qwcz6okp7o6phup7iad","failure":null,"model":"scripted","message":"msg_script_0","stop_reason":"tool_use","stop_details":null,"usage":{"input_tokens":14,"output_tokens":29,"cache_creation_input_tokens":0,"cache_read_input_tokens":0},"first_token_ms":2,"duration_ms":2}','f6e62c4f7e1db7d493facfca38f618bd55f7b71c035ef989d835b59e951257fa','5a9351307bda92ba2b87944401cd8a40b995559cddda2450d09d8b4114e27ae6');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',9,'sevt_zai6sr3wp3jx7cgrjr3u27k2','2026-11-29T18:54:48.161Z','tool_started','{"call":"call_bevfzb5ynefymy44g5z3y3bz","journal":"journal-1","fence":1}','5a9351307bda92ba2b87944401cd8a40b995559cddda2450d09d8b4114e27ae6','45cb0f40cd233f16a9a0949b27efcc0f5333118a666f77c1a05f61fa432f0524');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',10,'sevt_clvtyqpthjazw333sp35765q','2026-11-29T18:54:48.171Z','tool_result','{"tool_use":"sevt_6rhqk7utjxagr3zxadsqo27n","call":"call_bevfzb5ynefymy44g5z3y3bz","content":[{"type":"text","text":"ran one"}],"is_error":false,"outcome":"finished","receipt":{"sandbox":null,"exit_code":0,"signal":null,"output_bytes":7,"spill":null,"started_at":"2026-01-01T00:00:00.000Z","duration_ms":1,"provision_us":2000,"layers":[],"journal":"journal-1","masked":0}}','45cb0f40cd233f16a9a0949b27efcc0f5333118a666f77c1a05f61fa432f0524','6d289f13d0e84185b5c9712cdf1949984a9b73da3a36e483c8ac516613234476');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',11,'sevt_o5bkfygyr7dlw52dj6nggoin','2026-11-29T18:54:48.177Z','model_request_started','{"model":"any-model","profile":"whole-log/1"}','6d289f13d0e84185b5c9712cdf1949984a9b73da3a36e483c8ac516613234476','500e3a7b435aa2117b15960bc9bc20a8b58a8d2ec266a1d69dcf140e8e02021f');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',12,'sevt_5i5lnakhrovv55v2ve7oi3tl','2026-11-29T18:54:48.188Z','agent_message','{"request":"sevt_o5bkfygyr7dlw52dj6nggoin","content":[{"type":"text","text":"Two."}]}','500e3a7b435aa2117b15960bc9bc20a8b58a8d2ec266a1d69dcf140e8e02021f','3ef4ee81c4aba9789028849a9d323b8ad89bfda41395f04d686afe723462bbc2');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',13,'sevt_6cp53s5bm5dagtsgtjijtbnt','2026-11-29T18:54:48.188Z','model_request_ended','{"request":"sevt_o5bkfygyr7dlw52dj6nggoin","failure":null,"model":"scripted","message":"msg_script_1","stop_reason":"end_turn","stop_details":null,"usage":{"input_tokens":83,"output_tokens":8,"cache_creation_input_tokens":0,"cache_read_input_tokens":0},"first_token_ms":2,"duration_ms":2}','3ef4ee81c4aba9789028849a9d323b8ad89bfda41395f04d686afe723462bbc2','1441c2d555068b81c6120ca26d12a2e4f93fdd7ca0312fa4bdeecfdede85231b');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',14,'sevt_4ra64mqvrmiko7mobql4yug4','2026-11-29T18:54:48.198Z','usage','{"usage":{"input_tokens":97,"output_tokens":37,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}','1441c2d555068b81c6120ca26d12a2e4f93fdd7ca0312fa4bdeecfdede85231b','25caf5bf39596558663c357ce221e8371062fcce7412dc5ca8664c520a0d7f93');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',15,'sevt_xnuezwkt3fixed7kb45vvkiz','2026-11-29T18:54:48.198Z','status_idle','{"stop_reason":{"type":"end_turn"},"stop_details":null}','25caf5bf39596558663c357ce221e8371062fcce7412dc5ca8664c520a0d7f93','5a43065adae28992a1910e1fa286e46ab0345123c490487c84a522be0f3480a8');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',16,'sevt_l6adkrtahkidzmiynpildukc','2026-11-29T18:54:48.210Z','user_message','{"content":[{"type":"text","text":"again"}]}','5a43065adae28992a1910e1fa286e46ab0345123c490487c84a522be0f3480a8','9c482612354916321ba39ec5aa9fe0ccfe66d8a59b2b06f9aca6c8ad4dd46e7c');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',17,'sevt_r7y3vkapvg7y2dljzejwdrzj','2026-11-29T18:54:48.237Z','status_running','{}','9c482612354916321ba39ec5aa9fe0ccfe66d8a59b2b06f9aca6c8ad4dd46e7c','e5a0b0bfab243eede2fc073acc56b287797b3e5fb5b91cd8b6be395e8a3416af');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',18,'sevt_lotwc57u5a4g3iortdezhmyf','2026-11-29T18:54:48.237Z','processed','{"events":["sevt_l6adkrtahkidzmiynpildukc"]}','e5a0b0bfab243eede2fc073acc56b287797b3e5fb5b91cd8b6be395e8a3416af','6c0ce85d0da393821dba1f937909731900340fb1baad05282ba30c9fe7d14d0e');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',19,'sevt_spmgubxg6f3yoy5pqllqhsl4','2026-11-29T18:54:48.244Z','model_request_started','{"model":"any-model","profile":"whole-log/1"}','6c0ce85d0da393821dba1f937909731900340fb1baad05282ba30c9fe7d14d0e','59b4bf3695a2a09ae73a607ec2fd8cab033d0e3e34f5791fe909b415817619df');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',20,'sevt_fk6vow5hjwo3nmwon5mqqfw5','2026-11-29T18:54:48.250Z','agent_message','{"request":"sevt_spmgubxg6f3yoy5pqllqhsl4","content":[{"type":"text","text":"Three."}]}','59b4bf3695a2a09ae73a607ec2fd8cab033d0e3e34f5791fe909b415817619df','9543cbd71f332a876407fd4473df41767d14bc90c435794abca351e80760030d');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',21,'sevt_npce4xccnwqav37e47iqjbch','2026-11-29T18:54:48.250Z','model_request_ended','{"request":"sevt_spmgubxg6f3yoy5pqllqhsl4","failure":null,"model":"scripted","message":"msg_script_2","stop_reason":"end_turn","stop_details":null,"usage":{"input_tokens":113,"output_tokens":8,"cache_creation_input_tokens":0,"cache_read_input_tokens":0},"first_token_ms":2,"duration_ms":2}','9543cbd71f332a876407fd4473df41767d14bc90c435794abca351e80760030d','7d8d95b1a0607cf19d0a01b5440d304a7086a389c842471fddba17e4b73d13af');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',22,'sevt_ybvp3chwj6lca6hdnwtmdyeq','2026-11-29T18:54:48.255Z','usage','{"usage":{"input_tokens":210,"output_tokens":45,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}','7d8d95b1a0607cf19d0a01b5440d304a7086a389c842471fddba17e4b73d13af','12a6fe4d7c45890df7d48ebbdef37d7ff71fe8bbdd08c73de3d52a7f9a95c0f9');
INSERT INTO "events" VALUES('sesn_r6b5rslpckkhqch2pc4v7flg',23,'sevt_rudpuof3zyt3fqieubrgtpbz','2026-11-29T18:54:48.255Z','status_idle','{"stop_reason":{"type":"end_turn"},"stop_details":null}','12a6fe4d7c45890df7d48ebbdef37d7ff71fe8bbdd08c73de3d52a7f9a95c0f9','4fb9f607cc6e92890d92d5e25e0413e612ba5a1c4e45c19b64b97805ec0f791e');
CREATE TABLE object_versions (
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,
        body TEXT NOT NULL,
        updated_at TEXT NOT NULL,
        PRIMARY KEY (kind, id, version)
    ) STRICT;
CREATE TABLE objects (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,
        owner TEXT NOT NULL,
        unique_name TEXT,
        body TEXT NOT NULL,
        created_at TEXT NOT NULL,
        updated_at TEXT NOT NULL,
        archived_at TEXT,
        UNIQUE (kind, id)
    ) STRICT;
INSERT INTO "objects" VALUES(1,'environment','env_myipfzjktaa3ol6rxybvibku',1,'uid:0','e37kvhhp','{"name":"e37kvhhp","description":null,"config":{"type":"cloud","networking":{"type":"unrestricted"},"packages":{"type":"packages","apt":[],"cargo":[],"gem":[],"go":[],"npm":[],"pip":[]}},"metadata":{},"scope":"organization"}','2026-11-29T18:54:48.103Z','2026-11-29T18:54:48.103Z',NULL);
INSERT INTO "objects" VALUES(2,'agent','agent_6p4l2qguit6t3nwx2o5re6o7',1,'uid:0',NULL,'{"name":"tester","description":null,"model":{"id":"any-model","effort":{"type":"high"}},"system":null,"tools":[{"type":"agent_toolset_20260401","default_config":{"enabled":true,"permission_policy":{"type":"always_allow"}},"configs":[{"name":"bash","type":"bash","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"edit","type":"edit","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"read","type":"read","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"write","type":"write","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"glob","type":"glob","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"grep","type":"grep","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"web_fetch","type":"web_fetch","enabled":false,"permission_policy":{"type":"always_allow"}},{"name":"web_search","type":"web_search","enabled":false,"permission_policy":{"type":"always_allow"}}]}],"mcp_servers":[],"skills":[],"multiagent":null,"execution_identity":{"type":"service_account"},"metadata":{}}','2026-11-29T18:54:48.105Z','2026-11-29T18:54:48.105Z',NULL);
INSERT INTO "objects" VALUES(3,'session','sesn_r6b5rslpckkhqch2pc4v7flg',1,'uid:0',NULL,'{"title":null,"metadata":{},"agent":{"id":"agent_6p4l2qguit6t3nwx2o5re6o7","type":"agent","version":1,"name":"tester","description":null,"model":{"id":"any-model","effort":{"type":"high"}},"system":null,"tools":[{"type":"agent_toolset_20260401","default_config":{"enabled":true,"permission_policy":{"type":"always_allow"}},"configs":[{"name":"bash","type":"bash","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"edit","type":"edit","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"read","type":"read","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"write","type":"write","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"glob","type":"glob","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"grep","type":"grep","enabled":true,"permission_policy":{"type":"always_allow"}},{"name":"web_fetch","type":"web_fetch","enabled":false,"permission_policy":{"type":"always_allow"}},{"name":"web_search","type":"web_search","enabled":false,"permission_policy":{"type":"always_allow"}}]}],"mcp_servers":[],"skills":[],"multiagent":null,"execution_identity":{"type":"service_account"}},"agent_id":"agent_6p4l2qguit6t3nwx2o5re6o7","agent_version":1,"environment_id":"env_myipfzjktaa3ol6rxybvibku"}','2026-11-29T18:54:48.107Z','2026-11-29T18:54:48.107Z',NULL);
CREATE TABLE tombstones (
        session TEXT PRIMARY KEY NOT NULL,
        owner TEXT NOT NULL,
        deleted_at TEXT NOT NULL,
        deleted_by TEXT NOT NULL,
        events INTEGER NOT NULL,
        head TEXT NOT NULL
    ) STRICT;
CREATE INDEX chains_unsettled ON chains (session) WHERE unsettled = 1;
CREATE INDEX objects_by_owner ON objects (kind, owner, position);
CREATE UNIQUE INDEX objects_by_name ON objects (kind, owner, unique_name)
        WHERE unique_name IS NOT NULL AND archived_at IS NULL;
CREATE TRIGGER events_are_not_changed BEFORE UPDATE ON events
        BEGIN SELECT RAISE(ABORT, 'events are never changed'); END;
CREATE TRIGGER events_are_not_removed BEFORE DELETE ON events
        WHEN NOT EXISTS (SELECT 1 FROM tombstones WHERE session = OLD.session)
        BEGIN SELECT RAISE(ABORT, 'events go only with their whole session'); END;
CREATE TRIGGER tombstones_are_not_changed BEFORE UPDATE ON tombstones
        BEGIN SELECT RAISE(ABORT, 'tombstones are never changed'); END;
CREATE TRIGGER tombstones_are_not_removed BEFORE DELETE ON tombstones
        BEGIN SELECT RAISE(ABORT, 'tombstones are never removed'); END;
CREATE TRIGGER deleted_sessions_stay_deleted BEFORE INSERT ON events
        WHEN EXISTS (SELECT 1 FROM tombstones WHERE session = NEW.session)
        BEGIN SELECT RAISE(ABORT, 'the session was deleted'); END;
PRAGMA user_version = 1;
