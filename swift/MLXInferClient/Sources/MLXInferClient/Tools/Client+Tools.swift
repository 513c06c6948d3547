import Foundation

extension Client {
    /// The whole answer to a request whose tools are run here, as often as the model calls them.
    ///
    /// - Throws: ``MLXInferError/tooManyToolRounds(_:)`` after ``ToolPolicy/maxRounds``, and the error of a tool if the policy says so.
    public func respond(to request: ChatRequest, calling tools: [CallableTool], policy: ToolPolicy = ToolPolicy()) async throws -> ToolRun {
        var run = ToolRun()
        try await loop(request, tools, policy) { run.add($0) }
        return run
    }

    /// The answer to a request whose tools are run here, while it is written.
    ///
    /// Cancelling the task that reads cancels the tools as well.
    public func chat(
        _ request: ChatRequest, calling tools: [CallableTool], policy: ToolPolicy = ToolPolicy()
    ) -> AnswerEvents<ToolEvent> {
        AnswerEvents(.toolEvents()) { buffer in try await loop(request, tools, policy) { buffer.add($0) } }
    }

    /// The answer to a request as a type of yours, after the tools that the model calls before it were run here.
    public func generate<Value: Guided>(
        _ type: Value.Type = Value.self, _ request: ChatRequest, calling tools: [CallableTool], policy: ToolPolicy = ToolPolicy()
    ) async throws -> Value {
        try await respond(to: request.guided(by: type), calling: tools, policy: policy).response.decoded(as: type)
    }

    /// The answer to a request as a type of yours, while it is written, after the tools that the model calls before it were run here.
    public func stream<Value: Guided>(
        _ type: Value.Type = Value.self, _ request: ChatRequest, calling tools: [CallableTool], policy: ToolPolicy = ToolPolicy()
    ) -> AnswerEvents<Snapshot<Value>> {
        AnswerEvents(.newest()) { buffer in
            var maker = SnapshotMaker<Value>()
            try await loop(request.guided(by: type), tools, policy) { event in
                guard case .answer(let event) = event else { return }
                if case .started = event { maker = SnapshotMaker() }
                if let snapshot = try maker.add(event) { buffer.add(snapshot) }
            }
        }
    }

    /// Asks, runs the calls of the answer, and asks again with their results, until an answer has no calls.
    private func loop(
        _ request: ChatRequest, _ tools: [CallableTool], _ policy: ToolPolicy, emit: (ToolEvent) throws -> Void
    ) async throws {
        var request = request
        request.tools += tools.map(\.tool)
        for round in 0... {
            if round >= policy.maxRounds, policy.onLimit == .answer { request.toolChoice = ToolChoice.none }
            var answer = ChatResponse()
            for try await event in chat(request) {
                answer.add(event)
                try emit(.answer(event))
            }
            if answer.finishReason == nil { try Task.checkCancellation() }
            guard !tools.isEmpty, answer.finishReason == .toolCalls, !answer.toolCalls.isEmpty else { return }
            guard round < policy.maxRounds else { throw MLXInferError.tooManyToolRounds(policy.maxRounds) }
            try emit(.calling(answer.toolCalls))
            let results = try await policy.run(answer.toolCalls, with: tools)
            try emit(.called(results))
            request.messages += [answer.message] + results.map(\.message)
            // A call that was demanded has been made; demanded again, it would never end.
            if request.toolChoice != nil, request.toolChoice != ToolChoice.none { request.toolChoice = .auto }
        }
    }
}

extension ToolPolicy {
    /// The results of calls, in their order.
    func run(_ calls: [ToolCall], with tools: [CallableTool]) async throws -> [ToolResult] {
        guard runsConcurrently, calls.count > 1 else {
            var results: [ToolResult] = []
            for call in calls { results.append(try await run(call, with: tools)) }
            return results
        }
        return try await withThrowingTaskGroup(of: (Int, ToolResult).self) { group in
            for (index, call) in calls.enumerated() { group.addTask { (index, try await run(call, with: tools)) } }
            return try await group.reduce(into: []) { $0.append($1) }.sorted { $0.0 < $1.0 }.map(\.1)
        }
    }

    private func run(_ call: ToolCall, with tools: [CallableTool]) async throws -> ToolResult {
        try Task.checkCancellation()
        do {
            guard let tool = tools.first(where: { $0.tool.name == call.name }) else {
                throw MLXInferError.undecodableAnswer(text: call.arguments, reason: "there is no tool named \(call.name)")
            }
            let parts = try await tool(call)
            try Task.checkCancellation()
            return ToolResult(call: call, parts: parts)
        } catch {
            try Task.checkCancellation()
            guard onFailure == .handToModel else { throw error }
            let reason = (error as? any LocalizedError)?.errorDescription ?? "\(error)"
            return ToolResult(call: call, parts: [.text("error: \(reason)")], isFailure: true)
        }
    }
}

extension EventBuffer where Element == ToolEvent {
    /// Keeps 256 events apart, and joins pieces of texts and calls after that.
    static func toolEvents() -> EventBuffer<ToolEvent> {
        EventBuffer(limit: 256) { event, waiting in
            guard case .answer(let next) = event else { return false }
            for index in waiting.indices.reversed().prefix(8) {
                guard case .answer(var last) = waiting[index] else { return false }
                waiting[index] = .calling([])  // so that the text has one owner while it grows
                let hasJoined = last.join(next)
                waiting[index] = .answer(last)
                if hasJoined { return true }
            }
            return false
        }
    }
}
