import Foundation
import Testing

@testable import MLXInferClient

extension LiveTests.Cancelling {
    private var server: LiveServer { LiveServer.shared }

    private func endless(_ prompt: String = "Tell me a long story.") -> ChatRequest {
        var request = ChatRequest([.user(prompt)], options: SamplingOptions(maxTokens: 1500))
        request.additionalFields = ["ignore_eos": true]
        return request
    }

    @Test func theServerStopsAtOnce() async throws {
        var delays: [Duration] = []
        for _ in 0..<5 {
            let cancelled = try await server.metric("mlxinfer_requests_cancelled_total")
            let stepsBefore = try await server.metric("mlxinfer_engine_steps_total")
            let client = server.client
            let request = endless()
            let pieces = Counter()
            let task = Task {
                for try await event in client.chat(request) { if case .text = event { pieces.add() } }
            }
            #expect(await eventually { pieces.value >= 5 })
            let start = ContinuousClock.now
            task.cancel()
            await #expect(throws: MLXInferError.cancelled) { try await task.value }
            #expect(try await eventually { try await server.metric("mlxinfer_requests_cancelled_total") == cancelled + 1 })
            #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
            delays.append(.now - start)
            let steps = try await server.metric("mlxinfer_engine_steps_total")
            #expect(try await server.metric("mlxinfer_engine_steps_total") == steps && pieces.value < 500)
            print("read \(pieces.value) pieces, the engine made \(Int(steps - stepsBefore)) steps")
        }
        print("from cancelling to no running request, as /metrics shows it: \(delays.sorted())")
    }

    @Test func beforeTheFirstToken() async throws {
        let cancelled = try await server.metric("mlxinfer_requests_cancelled_total")
        let client = server.client
        let request = endless(String(repeating: "All work and no play makes Jack a dull boy. ", count: 120))
        let task = Task { try await client.respond(to: request) }
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 1 })
        task.cancel()
        await #expect(throws: MLXInferError.cancelled) { try await task.value }
        #expect(try await eventually { try await server.metric("mlxinfer_requests_cancelled_total") == cancelled + 1 })
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
    }

    @Test func leavingTheLoop() async throws {
        for try await event in server.client.chat(endless()) { if case .text = event { break } }
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
        #expect(try await server.metric("mlxinfer_kv_cache_pages_used") == 0)
    }
}

/// Counts what several tasks see.
final class Counter: @unchecked Sendable {
    private let lock = NSLock()
    private var count = 0
    var value: Int { lock.withLock { count } }
    func add() { lock.withLock { count += 1 } }
}
