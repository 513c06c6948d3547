extension Client {
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

    /// Whether the server answers: at once, and then each time that this changes, such as when it is back after a restart.
    ///
    /// - Parameter interval: The pause between two looks.
    public func availability(every interval: Duration = .seconds(2)) -> AsyncStream<Bool> {
        AsyncStream(bufferingPolicy: .bufferingNewest(1)) { continuation in
            let task = Task {
                var last: Bool?
                while !Task.isCancelled {
                    let now = await isReady()
                    if now != last, !Task.isCancelled { continuation.yield(now) }
                    last = now
                    try? await Task.sleep(for: interval)
                }
                continuation.finish()
            }
            continuation.onTermination = { _ in task.cancel() }
        }
    }

    /// Whether it answers now, and has its models loaded.
    public func isReady() async -> Bool {
        var hasty = self
        (hasty.reconnect, hasty.timeouts.silence) = (.never, min(timeouts.silence, .seconds(5)))
        return (try? await hasty.health().isReady) ?? false
    }
}
