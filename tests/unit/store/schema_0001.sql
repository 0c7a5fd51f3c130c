BEGIN TRANSACTION;
CREATE TABLE adapters (
	name VARCHAR(256) NOT NULL CHECK (length(name) > 0), 
	version VARCHAR(64) NOT NULL, 
	source TEXT NOT NULL, 
	pinned BOOLEAN NOT NULL, 
	labels TEXT NOT NULL, 
	created_s FLOAT NOT NULL, 
	updated_s FLOAT NOT NULL, 
	previous TEXT NOT NULL, 
	previous_sources TEXT NOT NULL, 
	PRIMARY KEY (name), 
	FOREIGN KEY(version) REFERENCES manifests (version), 
	CONSTRAINT pinned_is_boolean CHECK (pinned IN (0, 1))
);
INSERT INTO "adapters" VALUES('pirate','0000000000000000000000000000000000000000000000000000000000000001','/adapters/pirate ☃',1,'{"team": "sea", "\u043a\u043b\u044e\u0447": ""}',1.5,2.25,'["0000000000000000000000000000000000000000000000000000000000000007", "0000000000000000000000000000000000000000000000000000000000000006"]','{"0000000000000000000000000000000000000000000000000000000000000007": "/adapters/seven"}');
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE audit (
	id INTEGER NOT NULL, 
	at_s FLOAT NOT NULL, 
	action VARCHAR(16) NOT NULL CONSTRAINT action_is_known CHECK (action IN ('register', 'replace', 'rollback', 'unload', 'pin', 'unpin', 'label')), 
	name VARCHAR(256) NOT NULL, 
	version VARCHAR(64), 
	actor TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "audit" VALUES(1,1.0,'register','pirate','0000000000000000000000000000000000000000000000000000000000000001','key-1','because');
INSERT INTO "audit" VALUES(2,1.0,'pin','pirate','0000000000000000000000000000000000000000000000000000000000000001','key-1','because');
CREATE TABLE manifests (
	version VARCHAR(64) NOT NULL CHECK (length(version) = 64), 
	content TEXT NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "manifests" VALUES('0000000000000000000000000000000000000000000000000000000000000001','{"alpha": 16.5, "base_model": "org/model", "bytes": 5000, "chat_template": "{% for m in messages %}\u2603{% endfor %}", "dtype": "bfloat16", "host_bytes": 9000, "layers": [0, 3], "parameters": 1234, "rank": 8, "scale_rule": "alpha/r", "target_modules": ["k_proj", "q_proj"], "version": "0000000000000000000000000000000000000000000000000000000000000001"}');
CREATE INDEX audit_by_name ON audit (name, id);
COMMIT;
