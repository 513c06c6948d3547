extension Client {
    /// The models that the server has.
    public func models() async throws -> [Model] {
        try await IOThread.result { try Self.modelList(exchange($0)) }
    }

    /// How the server is. Does not wait longer than ``Reconnect`` says for one that is not running.
    public func health() async throws -> Health {
        try await IOThread.result { try Self.get("/health", exchange($0), as: Health.self) }
    }

    /// The server's counters, in Prometheus' text format.
    public func metrics() async throws -> String {
        try await IOThread.result { String(decoding: try Self.get("/metrics", exchange($0)), as: UTF8.self) }
    }

    /// Returns once the server answers, for apps that have just started it.
    ///
    /// - Parameter time: How long a server that does not run yet, or still loads its models, is waited for.
    public func waitUntilReady(upTo time: Duration = .seconds(60)) async throws {
        var patient = self
        patient.reconnect.upTo = time
        patient.timeouts.silence = max(timeouts.silence, time)
        _ = try await patient.health()
    }
}
