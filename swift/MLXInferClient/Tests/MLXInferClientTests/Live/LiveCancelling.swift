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
        var delays: [Double] = []
        for _ in 0..<8 {
            let cancelled = try await server.metric("mlxinfer_requests_cancelled_total")
            let before = try await server.metric("mlxinfer_engine_steps_total")
            let start = try #require(await cancelBehindFivePieces())
            #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
            let steps = try await server.metric("mlxinfer_engine_steps_total")
            #expect(try await eventually { try await server.metric("mlxinfer_requests_cancelled_total") == cancelled + 1 })
            #expect(try await server.metric("mlxinfer_engine_steps_total") == steps && steps - before < 500)
            let end = try #require(server.lastEnd(status: 499))
            #expect(end >= start.addingTimeInterval(-0.001))
            delays.append(end.timeIntervalSince(start) * 1000)
        }
        print("from cancelling to the end of the request in the server's log: \(delays.map { Int($0.rounded()) }.sorted()) ms")
    }

    /// When a task that reads an endless answer was cancelled; nil if that did not end it.
    private func cancelBehindFivePieces() async -> Date? {
        let (client, request) = (server.client, endless())
        return await Task {
            var (pieces, start) = (0, Date())
            do {
                for try await event in client.chat(request) {
                    if case .text = event { pieces += 1 }
                    guard pieces == 5 else { continue }
                    start = Date()
                    withUnsafeCurrentTask { $0?.cancel() }
                }
                return nil
            } catch {
                return error is CancellationError ? start : nil
            }
        }.value
    }

    @Test func beforeTheFirstToken() async throws {
        let cancelled = try await server.metric("mlxinfer_requests_cancelled_total")
        let client = server.client
        let request = endless(String(repeating: "All work and no play makes Jack a dull boy. ", count: 120))
        let task = Task { try await client.respond(to: request) }
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 1 })
        task.cancel()
        await #expect(throws: CancellationError.self) { try await task.value }
        #expect(try await eventually { try await server.metric("mlxinfer_requests_cancelled_total") == cancelled + 1 })
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
    }

    @Test func leavingTheLoop() async throws {
        for try await event in server.client.chat(endless()) { if case .text = event { break } }
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
        #expect(try await server.metric("mlxinfer_kv_cache_pages_used") == 0)
    }
}
